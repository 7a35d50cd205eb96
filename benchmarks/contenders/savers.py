"""The peers: every other way to save and load the state of a DistributedDataParallel training.

A peer gets what it needs to be at its best: a process group of its own, kept buffers, and in-place
loading into state that exists already. Its packages are imported when it is made.
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from core.rank import COLLECTIVE_TIMEOUT, Context
from torch import Tensor, nn

from .training import optimizer_tensors, state_tensors

WAIT = COLLECTIVE_TIMEOUT.total_seconds()


class Saver(ABC):
    """One way to save. ``save`` and ``before_update`` are what training waits for."""

    syncs = False
    """Whether the files are durable when ``wait`` returns."""

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, context: Context
    ) -> None:
        self.model, self.optimizer, self.context = model, optimizer, context

    @abstractmethod
    def save(self, folder: Path) -> None: ...

    def before_update(self) -> None:
        """Before the first update after a save."""
        return

    def wait(self) -> None:
        """Until the peer itself says that it is done."""
        return

    @abstractmethod
    def load(self, folder: Path) -> None:
        """Into the live tensors; all ranks call it."""

    def close(self) -> None:
        """Nothing is kept."""
        return

    def state(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optim": self.optimizer.state_dict()}


class BufferCopies:
    """Copies of what forward changes, for peers that read the state while it runs.

    They guard the update and not forward, so statistics of BatchNorm would be saved half new. The
    copies are kept, so that a peer which remembers tensors finds them again.
    """

    def __init__(self, model: nn.Module) -> None:
        saved = model.state_dict().keys()
        self.live = {name: live for name, live in model.named_buffers() if name in saved}
        self.copies = {name: live.clone() for name, live in self.live.items()}

    def in_place_of(self, state: dict[str, Any]) -> dict[str, Any]:
        if self.copies:
            torch._foreach_copy_(list(self.copies.values()), list(self.live.values()))
        return {**state, "model": {**state["model"], **self.copies}}


def copy_optimizer(optimizer: torch.optim.Optimizer, state: dict[int, dict[str, Any]]) -> None:
    """In place: cheaper than load_state_dict, which makes new tensors."""
    with torch.no_grad():
        for number, name, tensor in optimizer_tensors(optimizer):
            tensor.copy_(state[number][name])


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


class Dcp(Saver):
    """torch.distributed.checkpoint; its writer calls fsync for files, though not for folders."""

    syncs = True

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        # Its background thread plans with collectives, which must not mix with the training's.
        self.group = dist.new_group(backend="gloo", timeout=COLLECTIVE_TIMEOUT)

    def save(self, folder: Path) -> None:
        import torch.distributed.checkpoint as dcp

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp.save(self.state(), checkpoint_id=folder, process_group=self.group)

    def load(self, folder: Path) -> None:
        import torch.distributed.checkpoint as dcp

        # Tensors are loaded in place: nothing to copy afterwards.
        dcp.load(self.state(), checkpoint_id=folder, process_group=self.group)

    def close(self) -> None:
        dist.destroy_process_group(self.group)


class DcpAsync(Dcp):
    """async_save as it comes: a new stager each time, which copies before the call returns."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.pending: Any = None

    def options(self) -> dict[str, Any]:
        return {}

    def to_save(self) -> dict[str, Any]:
        return self.state()

    def save(self, folder: Path) -> None:
        import torch.distributed.checkpoint as dcp

        self.pending = dcp.async_save(
            self.to_save(), checkpoint_id=folder, process_group=self.group, **self.options()
        )

    def before_update(self) -> None:
        staged = getattr(self.pending, "staging_completion", None)
        if staged is not None:
            staged.result(WAIT)

    def wait(self) -> None:
        if self.pending is not None:
            getattr(self.pending, "upload_completion", self.pending).result(WAIT)
            self.pending = None


class DcpAsyncHardest(DcpAsync):
    """Kept buffers, staging in a thread, plans kept: the strongest setting without a GPU."""

    shared = False

    def __init__(self, *given: Any) -> None:
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

        super().__init__(*given)
        self.stager = DefaultStager(StagingOptions(False, self.shared, True, False))
        self.buffers = BufferCopies(self.model)

    def to_save(self) -> dict[str, Any]:
        return self.buffers.in_place_of(self.state())

    def options(self) -> dict[str, Any]:
        from torch.distributed.checkpoint import DefaultSavePlanner

        planner = DefaultSavePlanner(enable_plan_caching=True)
        return {"async_stager": self.stager, "planner": planner}

    def close(self) -> None:
        self.stager.close()
        super().close()


class DcpAsyncProcess(DcpAsyncHardest):
    """The same, written by a process of its own through shared memory."""

    shared = True

    def options(self) -> dict[str, Any]:
        from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

        return {
            **super().options(),
            "async_checkpointer_type": AsyncCheckpointerType.PROCESS,
        }


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
        raise NotImplementedError("nothing was written")

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
    "memcpy": Memcpy,
}
