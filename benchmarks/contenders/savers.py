"""All peers by name, and the limit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from core.rank import COLLECTIVE_TIMEOUT
from torch import Tensor

from .dcp import Dcp, DcpAsync, DcpAsyncHardest, DcpAsyncProcess
from .dlrover import Dlrover
from .saver import WAIT, BufferCopies, Saver, copy_optimizer
from .training import state_tensors


class TorchSave(Saver):
    mmap = False

    def save(self, folder: Path) -> None:
        if self.context.rank == 0:
            folder.mkdir(parents=True)
            torch.save(self.state(), folder / "state.pt")

    def load(self, folder: Path) -> None:
        found = torch.load(folder / "state.pt", mmap=self.mmap, weights_only=True)
        self.model.load_state_dict(found["model"])
        copy_optimizer(self.optimizer, found["optim"]["state"])


class TorchLoadMmap(TorchSave):
    mmap = True


class Safetensors(Saver):
    """Tensors only; the few numbers of the optimizer's groups would go into its metadata."""

    def save(self, folder: Path) -> None:
        from safetensors.torch import save_file

        if self.context.rank == 0:
            folder.mkdir(parents=True)
            save_file(state_tensors(self.model, self.optimizer), folder / "state.safetensors")

    def load(self, folder: Path) -> None:
        from safetensors import safe_open

        with (
            safe_open(folder / "state.safetensors", framework="pt") as file,
            torch.no_grad(),
        ):
            for name, tensor in state_tensors(self.model, self.optimizer).items():
                tensor.copy_(file.get_tensor(name))


class TorchCheckpointing(Saver):
    """Stages in a thread, writes in a process; the update takes its lock. Every rank writes all."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        from torch_checkpointing import CheckpointManager
        from torch_checkpointing.config import AsyncCheckpointSaverConfig
        from torch_checkpointing.staging import CheckpointStagerConfig
        from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

        staging = CheckpointStagerConfig(use_pinned_memory=False, use_non_blocking_copy=False)
        self.manager = CheckpointManager(
            CheckpointManager.Config(
                save=AsyncCheckpointSaverConfig(staging_config=staging),
                # Its direct writes end in EINVAL on ext4.
                storage_config=LocalFileSystemStorageConfig(use_direct_io=False),
            )
        )
        self.pending: Any = None
        self.buffers = BufferCopies(self.model)

    def save(self, folder: Path) -> None:
        state = self.buffers.in_place_of(self.state())
        self.pending = self.manager.save(str(folder), state)

    def before_update(self) -> None:
        with self.manager.lock():
            pass

    def wait(self) -> None:
        if self.pending is not None:
            self.pending.result(WAIT)
            self.pending = None

    def load(self, folder: Path) -> None:
        found = self.manager.load(str(folder), into=self.state())
        self.model.load_state_dict(found["model"])
        copy_optimizer(self.optimizer, found["optim"]["state"])

    def close(self) -> None:
        self.manager.close()


class TorchSnapshot(Saver):
    """replicated="**" splits the writing over the ranks."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        import torchsnapshot

        self.library = torchsnapshot
        self.group = dist.new_group(backend="gloo", timeout=COLLECTIVE_TIMEOUT)

    def app_state(self) -> dict[str, Any]:
        return {"model": self.model, "optim": self.optimizer}

    def save(self, folder: Path) -> None:
        self.library.Snapshot.take(str(folder), self.app_state(), pg=self.group, replicated=["**"])

    def load(self, folder: Path) -> None:
        self.library.Snapshot(str(folder), pg=self.group).restore(self.app_state())

    def close(self) -> None:
        dist.destroy_process_group(self.group)


class TorchSnapshotAsync(TorchSnapshot):
    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.pending: Any = None

    def save(self, folder: Path) -> None:
        self.pending = self.library.Snapshot.async_take(
            str(folder), self.app_state(), pg=self.group, replicated=["**"]
        )

    def wait(self) -> None:
        if self.pending is not None:
            self.pending.wait()
            self.pending = None


class Memcpy(Saver):
    """The limit: this rank's share of the bytes, copied into memory that is mapped already."""

    syncs = True  # nothing is written

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.copies: list[tuple[Tensor, Tensor]] | None = None

    def save(self, folder: Path) -> None:
        if self.copies is None:
            self.copies = self.plan()
        for target, source in self.copies:
            target.copy_(source)

    def plan(self) -> list[tuple[Tensor, Tensor]]:
        tensors = state_tensors(self.model, self.optimizer).values()
        views = [t.detach().view(-1).view(torch.uint8) for t in tensors if t.is_contiguous()]
        total = sum(view.numel() for view in views)
        rank, world = self.context.rank, self.context.world
        begin, end = total * rank // world, total * (rank + 1) // world
        buffer = torch.zeros(end - begin, dtype=torch.uint8).fill_(1)
        return share_of(views, begin, end, buffer)

    def load(self, folder: Path) -> None:
        """The share this rank copied; what other ranks have stays with them."""
        for copy, live in self.copies or ():
            live.copy_(copy)

    def close(self) -> None:
        self.copies = None


def share_of(
    views: list[Tensor], begin: int, end: int, buffer: Tensor
) -> list[tuple[Tensor, Tensor]]:
    """Where the bytes from ``begin`` to ``end`` of all views in a row go in the buffer."""
    copies, at = [], 0
    for view in views:
        first, last = max(begin, at), min(end, at + view.numel())
        if first < last:
            copies.append((buffer[first - begin : last - begin], view[first - at : last - at]))
        at += view.numel()
    return copies


SAVERS: dict[str, Callable[..., Saver]] = {
    "torch.save": TorchSave,
    "safetensors": Safetensors,
    "dcp": Dcp,
    "dcp async": DcpAsync,
    "dcp async hardest": DcpAsyncHardest,
    "dcp async process": DcpAsyncProcess,
    "torch_checkpointing": TorchCheckpointing,
    "torchsnapshot": TorchSnapshot,
    "torchsnapshot async": TorchSnapshotAsync,
    "dlrover": Dlrover,
    "memcpy": Memcpy,
}
