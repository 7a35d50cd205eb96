"""What runs inside the ranks of checkpoint_restore.py: one group saves, a fresh one restores."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from core.processes import group_cpu_seconds
from core.rank import Context

from .files import sync_tree, tree_bytes
from .saver import Saver
from .savers import SAVERS, TorchLoadMmap
from .taking_ours import ENGINE
from .training import (
    Ddp,
    Sapwood,
    Training,
    Workload,
    digests,
    make,
    prepare,
    spoil,
    state_bytes,
    state_tensors,
)

__all__ = ["CONTENDERS", "create", "prepare", "restore", "save", "size"]


class Restorer(ABC):
    """A training and a way to load into it, from a folder that an earlier group has filled."""

    def __init__(self, training: Training, context: Context, name: str) -> None:
        self.training, self.context = training, context
        self.folder = Path(context.options["store"]) / name.replace(" ", "-")

    @abstractmethod
    def save(self) -> None: ...

    def begin(self) -> None:
        """Untimed, before a restore."""
        return

    @abstractmethod
    def restore(self) -> None: ...

    def end(self) -> None:
        """Untimed, after it."""
        return

    def close(self) -> None:
        self.training.close()


class Peer(Restorer):
    def __init__(
        self, training: Training, context: Context, name: str, make: Callable[..., Saver]
    ) -> None:
        super().__init__(training, context, name)
        self.saver = make(training.plain, training.optimizer, context)

    def save(self) -> None:
        self.saver.save(self.folder)
        self.saver.before_update()
        self.saver.wait()

    def restore(self) -> None:
        self.saver.load(self.folder)

    def close(self) -> None:
        self.saver.close()
        super().close()


class Ours(Restorer):
    """Files alone: what memory of other processes may still hold would be no restore from disk."""

    def begin(self) -> None:
        import sapwood

        assert isinstance(self.training, Sapwood)
        self.checkpointer = sapwood.Checkpointer(
            self.training.run, self.folder, tiers=("external",), engine=ENGINE, keep=None
        )

    def save(self) -> None:
        self.begin()
        self.checkpointer.save()
        self.checkpointer.wait()
        self.end()

    def restore(self) -> None:
        if self.checkpointer.restore_latest() is None:
            raise RuntimeError("there is no checkpoint")

    def end(self) -> None:
        self.checkpointer.close()


class Memcpy(Restorer):
    """The limit: all bytes of the state, copied from memory to memory."""

    def save(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)

    def begin(self) -> None:
        tensors = state_tensors(self.training.plain, self.training.optimizer).values()
        self.targets = list(tensors)
        self.sources = [tensor.clone() for tensor in self.targets]

    def restore(self) -> None:
        with torch.no_grad():
            for target, source in zip(self.targets, self.sources, strict=True):
                target.copy_(source)

    def end(self) -> None:
        self.targets, self.sources = [], []


def create(
    workload: Workload, context: Context, made: dict[str, Any], contender: str
) -> dict[str, Any]:
    return make(CONTENDERS, workload, context, made, contender)


def save(
    workload: Workload, context: Context, made: dict[str, Any], contender: str
) -> dict[str, Any]:
    """What the second group must find: digests of the state that was saved."""
    chosen: Restorer = made[contender]
    live = digests(chosen.training.plain, chosen.training.optimizer)
    try:
        chosen.save()
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}
    context.barrier()
    if context.rank == 0:
        sync_tree(chosen.folder)
    context.barrier()
    return {"live": live, "bytes": tree_bytes(chosen.folder)}


def restore(
    workload: Workload, context: Context, made: dict[str, Any], contender: str, check: bool
) -> dict[str, Any]:
    try:
        return timed_restore(made[contender], check=check)
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}


def timed_restore(chosen: Restorer, *, check: bool) -> dict[str, Any]:
    context, training = chosen.context, chosen.training
    if check and not isinstance(chosen, Memcpy):
        spoil(training.plain, training.optimizer)
    chosen.begin()
    context.barrier()
    cpu = group_cpu_seconds() if context.rank == 0 else 0.0
    context.barrier()
    begun = time.perf_counter()
    chosen.restore()
    seconds = time.perf_counter() - begun
    context.barrier()
    cpu = group_cpu_seconds() - cpu if context.rank == 0 else 0.0
    chosen.end()
    found: dict[str, Any] = {"seconds": seconds, "cpu": cpu}
    if check and not isinstance(chosen, Memcpy):
        found["loaded"] = digests(training.plain, training.optimizer)
    return found


def size(workload: Workload, context: Context, made: dict[str, Any]) -> int:
    training = next(iter(workload.trainings.values()))
    return state_bytes(training.plain, training.optimizer)


def peer(
    name: str, make: Callable[..., Saver] | None = None
) -> Callable[[Workload, Context], Restorer]:
    saver = make or SAVERS[name]
    return lambda workload, context: Peer(workload.training(Ddp, context), context, name, saver)


CONTENDERS: dict[str, Callable[[Workload, Context], Restorer]] = {
    "sapwood": lambda workload, context: Ours(
        workload.training(Sapwood, context), context, "sapwood"
    ),
    "torch.load": peer("torch.load", SAVERS["torch.save"]),
    "torch.load mmap": peer("torch.load mmap", TorchLoadMmap),
    "safetensors": peer("safetensors"),
    "dcp": peer("dcp"),
    "torch_checkpointing": peer("torch_checkpointing"),
    "torchsnapshot": peer("torchsnapshot"),
    "memcpy": lambda workload, context: Memcpy(workload.training(Ddp, context), context, "memcpy"),
}
