"""Peers that read the same LMDB file, through py-lmdb."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import lmdb
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, Sampler
from torch.utils.data.distributed import DistributedSampler

from .data_formats import key_of
from .data_reading import Reading, Task, Tensors

THREADS = 8
"""Reads by page fault wait for the disk one by one; threads are what lets them overlap."""


class Records(Dataset):
    """Opened where it is used: neither an environment nor a transaction survives a fork."""

    def __init__(self, task: Task, *, readahead: bool) -> None:
        self.path, self.count, self.readahead = task.database, task.count, readahead
        self.env: Any = None

    def open(self) -> None:
        self.env = lmdb.open(
            self.path, subdir=False, readonly=True, lock=False, readahead=self.readahead
        )

    def __len__(self) -> int:
        return self.count

    def __getitems__(self, numbers: Sequence[int]) -> list[bytes]:
        """One transaction for a batch: the DataLoader's own fast path."""
        if self.env is None:
            self.open()
        with self.env.begin() as txn:
            return [txn.get(key_of(number)) for number in numbers]


class Samples(Records):
    """Record by record, each a tensor."""

    __getitems__ = None  # or the DataLoader would ask for a batch at once

    def __getitem__(self, number: int) -> torch.Tensor:
        if self.env is None:
            self.open()
        with self.env.begin() as txn:
            return torch.frombuffer(bytearray(txn.get(key_of(number))), dtype=torch.uint8)


def sampler_of(task: Task, records: Records) -> Sampler[int]:
    sampler = DistributedSampler(
        records, task.world, task.rank, shuffle=task.shuffles, drop_last=False
    )
    sampler.set_epoch(task.epoch)
    return sampler


def as_is(batch: list[bytes]) -> list[bytes]:
    return batch


class Loader(Tensors, Reading):
    """What the guides show: a lookup for each record, the DataLoader stacks them to a tensor."""

    readahead = True
    workers = 0
    loader: DataLoader[torch.Tensor] | None = None

    def batches(self) -> Iterator[Any]:
        if self.loader is None:
            records = Samples(self.task, readahead=self.readahead)
            self.loader = DataLoader(
                records,
                self.task.part,
                sampler=sampler_of(self.task, records),
                num_workers=self.workers,
                prefetch_factor=4 if self.workers else None,
                persistent_workers=self.workers > 0,
            )
        self.loader.sampler.set_epoch(self.task.epoch)  # type: ignore[attr-defined]
        yield from self.loader

    def close(self) -> None:
        self.loader = None


class LoaderWorkers(Loader):
    workers = 2


class LoaderPlain(Loader):
    readahead = False


class LoaderWorkersPlain(LoaderWorkers):
    readahead = False


class Lookups(Reading):
    """Batches looked up at once, in an environment that stays open."""

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        self.looked_up = Records(task, readahead=True)

    def sampler(self) -> Sampler[int]:
        return sampler_of(self.task, self.looked_up)

    def parts(self) -> BatchSampler:
        if self.looked_up.env is None:  # before threads would all open it
            self.looked_up.open()
        return BatchSampler(self.sampler(), self.task.part, drop_last=False)


class LoaderLean(Lookups):
    """As little as can be done with py-lmdb: no tensors, a transaction for a batch, no workers."""

    def batches(self) -> Iterator[Any]:
        yield from DataLoader(
            self.looked_up, self.task.part, sampler=self.sampler(), collate_fn=as_is
        )


class Torchdata(Lookups):
    """Its nodes: a batch sampler, and threads that read batches."""

    def batches(self) -> Iterator[Any]:
        from torchdata.nodes import Loader as NodeLoader
        from torchdata.nodes import ParallelMapper, SamplerWrapper

        mapper = ParallelMapper(
            SamplerWrapper(self.parts()),
            map_fn=self.looked_up.__getitems__,
            num_workers=THREADS,
            method="thread",
            in_order=True,
        )
        yield from NodeLoader(mapper)


READINGS = {
    "py-lmdb": Loader,
    "py-lmdb 2 workers": LoaderWorkers,
    "py-lmdb lean": LoaderLean,
    "py-lmdb no readahead": LoaderPlain,
    "py-lmdb 2 workers no readahead": LoaderWorkersPlain,
    "torchdata": Torchdata,
}
