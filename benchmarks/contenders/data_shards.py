"""Peers that read formats of their own."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from typing import Any

from .data_lmdb import THREADS, Lookups, as_is
from .data_reading import Reading, Task

BUFFER = 1000
"""Records among which webdataset shuffles: what its documentation shows."""


class Webdataset(Reading):
    """Tar shards, divided among ranks; shuffled by shards, and in a buffer."""

    format = "tar"

    def batches(self) -> Iterator[Any]:
        import webdataset as wds

        task = self.task
        os.environ["WDS_EPOCH"] = str(task.epoch)
        shards = wds.WebDataset(
            task.shards,
            nodesplitter=wds.split_by_node,
            shardshuffle=len(task.shards) if task.shuffles else False,
            empty_check=False,
            seed=task.epoch,
        )
        if task.shuffles:
            shards = shards.shuffle(BUFFER)
        batches = shards.map(take).batched(task.part, collation_fn=None)
        yield from wds.WebLoader(batches, batch_size=None, num_workers=0)


def take(sample: dict[str, Any]) -> bytes:
    return sample["bin"]


class SpdlTar(Reading):
    """Tar shards: threads read whole ones, its own parser cuts them; shuffled inside of each."""

    format = "tar"

    def batches(self) -> Iterator[Any]:
        from spdl.pipeline import PipelineBuilder

        task = self.task
        shards = task.shards
        if task.shuffles:
            random.Random(task.epoch).shuffle(shards)
        pipeline = (
            PipelineBuilder()
            .add_source(shards[task.rank :: task.world])
            .pipe(self.cut, concurrency=2)
            .disaggregate()
            .add_sink(64)
            .build(num_threads=2)
        )
        with pipeline.auto_stop():
            yield from pipeline.get_iterator(timeout=60)

    def cut(self, shard: str) -> list[list[memoryview]]:
        from spdl.io import iter_tarfile

        with open(shard, "rb") as file:  # noqa: PTH123 - as its documentation has it
            found = [record for _, record in iter_tarfile(file.read())]
        if self.task.shuffles:
            random.Random(self.task.epoch).shuffle(found)
        part = self.task.part
        return [found[at : at + part] for at in range(0, len(found), part)]


class SpdlLmdb(Lookups):
    """LMDB, for a global shuffle: threads that look up batches of keys."""

    def batches(self) -> Iterator[Any]:
        from spdl.pipeline import PipelineBuilder

        pipeline = (
            PipelineBuilder()
            .add_source(list(self.parts()))
            .pipe(self.looked_up.__getitems__, concurrency=THREADS)
            .add_sink(THREADS)
            .build(num_threads=THREADS)
        )
        with pipeline.auto_stop():
            yield from pipeline.get_iterator(timeout=60)


def spdl(task: Task) -> Reading:
    return SpdlLmdb(task) if task.order == "global" else SpdlTar(task)


class Litdata(Reading):
    """Chunks, read where they are; shuffled by chunks, and inside of each."""

    format = "litdata"
    loader: Any = None

    def batches(self) -> Iterator[Any]:
        from litdata import StreamingDataLoader, StreamingDataset

        task = self.task
        if self.loader is None:
            records = StreamingDataset(
                str(task.folder / "litdata"),
                shuffle=task.shuffles,
                drop_last=False,
                seed=task.epoch,
            )
            self.loader = StreamingDataLoader(
                records, batch_size=task.part, num_workers=0, collate_fn=as_is
            )
        yield from self.loader  # it counts its epochs itself


class Grain(Reading):
    """ArrayRecord: any record at any time, by threads; a shuffle is a global one.

    Record by record it reads a tenth as many as when it is asked for a batch at once.
    """

    format = "array_record"
    source: Any = None

    def batches(self) -> Iterator[Any]:
        import grain

        task = self.task
        if self.source is None:
            self.source = grain.sources.ArrayRecordDataSource(
                str(task.folder / "array_record" / "data.array_record")
            )
        numbers = grain.MapDataset.range(task.count)
        if task.shuffles:
            numbers = numbers.shuffle(seed=task.epoch)
        yield from (
            numbers[task.rank :: task.world]
            .batch(task.part, batch_fn=list)
            .map(self.source.__getitems__)
            .to_iter_dataset(grain.ReadOptions(num_threads=4, prefetch_buffer_size=8))
        )


READINGS = {
    "webdataset": Webdataset,
    "spdl": spdl,
    "litdata": Litdata,
    "grain": Grain,
}
