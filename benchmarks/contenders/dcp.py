"""torch.distributed.checkpoint in its settings, up to the strongest there is without a GPU."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch.distributed as dist
from core.rank import COLLECTIVE_TIMEOUT

from .saver import WAIT, BufferCopies, Saver


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
