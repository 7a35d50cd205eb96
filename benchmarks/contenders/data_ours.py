"""Our reader, with each of its policies and shuffles."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import timedelta
from functools import partial
from typing import Any

from sapwood.data import Batch, LmdbReader, Provenance, Reuse, Stagger
from sapwood.runtime.stores import PrefixStore, TCPStore

from .data_reading import Reading, Task

RING = 128 * 2**20
"""The default, said aloud because the table is about it."""
SHUFFLES = {"shuffled": "window"}


class Sapwood(Reading):
    def __init__(self, task: Task, policy: str = "auto", share: bool = False) -> None:
        super().__init__(task)
        self.policy, self.share = policy, share
        self.reader: LmdbReader | None = None

    def batches(self) -> Iterator[Batch]:
        if self.reader is None:
            self.reader = self.open()
        self.reader.set_epoch(self.task.epoch)
        yield from self.reader

    def close(self) -> None:
        if self.reader is not None:
            self.reader.close()

    def open(self) -> LmdbReader:
        task = self.task
        shuffle: Any = SHUFFLES.get(task.order, task.order)
        settings: dict[str, Any] = {"policy": self.policy, "memory": RING, "tail": "keep"}
        settings["share"] = self.share
        if self.policy == "prov":
            settings["provenance"] = Provenance(
                written="load", count=task.count, key_bytes=8, value_bytes=task.nbytes
            )
        if self.policy == "stag":
            settings["stagger"] = Stagger(store=self.store())
        if shuffle == "reuse":
            settings["reuse"] = Reuse(factor=2)
        return LmdbReader(task.database, task.batch, shuffle=shuffle, **settings)

    def store(self) -> PrefixStore:
        """The group's; tokens of another turn must not be taken for those of this one."""
        host, port = self.task.address
        store = TCPStore(host, port, is_master=False, timeout=timedelta(seconds=60))
        return PrefixStore(f"bench/{self.task.epoch}", store)

    def records(self, batch: Batch) -> list[memoryview]:
        return batch.records

    def facts(self) -> Mapping[str, float]:
        assert self.reader is not None
        stats = self.reader.stats()
        return {
            "requests": stats.requests,
            "read": stats.bytes_read,
            "useful": stats.bytes_useful,
            "wait": stats.wait_seconds,
            "stagger": stats.stagger_seconds,
            "missed": stats.missed_pages,
            "redundant": stats.redundant_pages,
            "score": self.reader.quality.score,
        }


POLICIES = ("auto", "lmdb", "lmm", "lmm-dm", "dio", "prov", "coal", "stag")
READINGS = {
    **{policy: partial(Sapwood, policy=policy) for policy in POLICIES},
    "auto, shared": partial(Sapwood, share=True),
    "sapwood": Sapwood,
    "sapwood ring": partial(Sapwood, policy="coal"),
}
