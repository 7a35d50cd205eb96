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
    """What the guides to LMDB with PyTorch show: opened where it is used, a lookup by key each."""

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

    def close(self) -> None:
        if self.env is not None:
            self.env.close()


def sampler_of(task: Task, records: Records) -> Sampler[int]:
    sampler = DistributedSampler(
        records, task.world, task.rank, shuffle=task.shuffles, drop_last=False
    )
    sampler.set_epoch(task.epoch)
    return sampler


def as_is(batch: list[bytes]) -> list[bytes]:
    return batch


def as_tensor(batch: list[bytes]) -> torch.Tensor:
    """Workers give tensors back through shared memory; a list of bytes would go through a pipe."""
    joined = torch.frombuffer(bytearray().join(batch), dtype=torch.uint8)
    return joined.view(len(batch), -1)


class Loader(Reading):
    """DataLoader in this process."""

    readahead = True

    def batches(self) -> Iterator[Any]:
        records = Records(self.task, readahead=self.readahead)
        sampler = sampler_of(self.task, records)
        yield from DataLoader(records, self.task.part, sampler=sampler, collate_fn=as_is)
        records.close()


class LoaderWorkers(Tensors, Reading):
    """DataLoader with two workers."""

    readahead = True

    def batches(self) -> Iterator[Any]:
        records = Records(self.task, readahead=self.readahead)
        sampler = sampler_of(self.task, records)
        yield from DataLoader(
            records,
            self.task.part,
            sampler=sampler,
            collate_fn=as_tensor,
            num_workers=2,
            prefetch_factor=4,
        )


class LoaderPlain(Loader):
    readahead = False


class LoaderWorkersPlain(LoaderWorkers):
    readahead = False


class Torchdata(Reading):
    """Its nodes: a batch sampler, and threads that read batches."""

    def batches(self) -> Iterator[Any]:
        from torchdata.nodes import Loader as NodeLoader
        from torchdata.nodes import ParallelMapper, SamplerWrapper

        records = Records(self.task, readahead=True)
        records.open()
        sampler = BatchSampler(sampler_of(self.task, records), self.task.part, drop_last=False)
        mapper = ParallelMapper(
            SamplerWrapper(sampler),
            map_fn=records.__getitems__,
            num_workers=THREADS,
            method="thread",
            in_order=True,
        )
        yield from NodeLoader(mapper)


READINGS = {
    "py-lmdb": Loader,
    "py-lmdb 2 workers": LoaderWorkers,
    "py-lmdb no readahead": LoaderPlain,
    "py-lmdb 2 workers no readahead": LoaderWorkersPlain,
    "torchdata": Torchdata,
}
