"""One walk of a rank through its parts of batches, from a position to the end of an epoch."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from sapwood.data.batch import Batch, KeyPlaces
from sapwood.data.decode import decode_batch
from sapwood.data.engines import Engine, EngineSettings, Job, choose
from sapwood.data.engines.spare import Spare
from sapwood.data.index import Index
from sapwood.data.node import Node, Shared
from sapwood.data.order import Chunks, Order
from sapwood.data.position import Position
from sapwood.data.provenance import Provenance
from sapwood.data.schedule import Asked, Schedule
from sapwood.data.source import Source
from sapwood.data.stats import Recorder
from sapwood.errors import UsageError

if TYPE_CHECKING:
    from sapwood.data.stagger import Gate, Stagger

__all__ = ["Pass", "Plan"]

Ints = NDArray[np.int64]


_inherited: list[Pass] = []
"""A forked child has no threads to end, and their locks may be held for ever: what it has of its
parent's passes is left alone, and not even collected."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a pass is about; nothing of it changes meanwhile."""

    index: Index
    chunks: Chunks
    """Of the order."""
    reads: Chunks
    """What is read at once."""
    order: Order
    policy: str
    settings: EngineSettings
    provenance: Provenance | None
    stagger: Stagger | None
    decode: Callable[[Batch], Any] | None
    rank: int
    world: int
    node: Node
    worker: int = 0
    workers: int = 1


class Pass:
    """An iterator over batches, and the position after the last one it gave."""

    def __init__(
        self,
        plan: Plan,
        position: Position,
        recorder: Recorder,
        spare: Spare,
        *,
        moved: Callable[[Position], object] = lambda position: None,
        ended: Callable[[], object] = lambda: None,
    ) -> None:
        """Open the database; reading begins with the first batch.

        ``moved`` is told the position after each batch, and ``ended`` of the end.

        Raises:
            DataError: the database cannot be read, or was changed.
        """
        self.position = position
        self._moved, self._ended = moved, ended
        self._plan, self._recorder, self._spare = plan, recorder, spare
        self._schedule = Schedule(
            order=plan.order, world=plan.world, worker=plan.worker, workers=plan.workers
        )
        self._asked: deque[Asked] = deque()
        self._pid = os.getpid()
        self._closed = False
        self._left: str | None = None
        """Why it was closed before its end."""
        self._source = Source(plan.index, spare.maps)
        self._batches = self._read()

    def __iter__(self) -> Pass:
        """An iterator is its own."""
        return self

    def __next__(self) -> Any:
        """The next batch, decoded if that was asked for.

        Raises:
            UsageError: it is another process's, or was ended by a call of the reader.
            DataError: the database was changed, or ``decode`` raised.
        """
        self._check_usable()
        start, open_before = perf_counter_ns(), not self._closed
        try:
            batch = next(self._batches)
        except BaseException as error:
            self.close()
            if open_before and isinstance(error, StopIteration):
                self._ended()
            raise
        found = batch if self._plan.decode is None else self._decode(self._plan.decode, batch)
        # Not before: what decode refuses has not been given out. The next call goes on after it.
        self.position = self.position.after(batch.epoch, batch.number, self._plan.order.batches)
        self._moved(self.position)
        self._recorder.given(start, batch.epoch, batch.number)
        return found

    def _check_usable(self) -> None:
        # Instead of StopIteration, which would make a loop end early without a word.
        if self._left is not None:
            raise UsageError(
                f"this iterator ended before its last batch, as {self._left}: a reader has one "
                "position; make another reader to read from two places"
            )
        if os.getpid() != self._pid:
            raise UsageError(
                f"this iterator is of process {self._pid}, and its threads are not in this one "
                f"({os.getpid()}); call iter(reader) here"
            )

    def close(self, why: str | None = None) -> None:
        """End the threads and close the file; calling it again does nothing.

        ``why`` is for those who ask for another batch afterwards.
        """
        if os.getpid() != self._pid:
            _inherited.append(self)
            return
        if not self._closed:
            self._left = why
        self._batches.close()
        self._source.close()
        if not self._closed:
            self._recorder.summarise(str(self._plan.index.file))
        self._closed = True

    def _read(self) -> Generator[Batch, None, None]:
        plan, until = self._plan, self.position.until
        job = Job(
            source=self._source,
            index=plan.index,
            chunks=plan.reads,
            settings=plan.settings,
            recorder=self._recorder,
            uses=plan.order.spec.factor,
            spare=self._spare,
        )
        while until is None or self.position.epoch < until:
            engine, stop = self._engine(job)
            with closing(engine.read(self._wanted(self.position, stop))) as batches:
                for data in batches:
                    yield self._batch(data)
            if stop is not None:  # a worker's last batch need not be the epoch's
                self.position = replace(self.position, epoch=stop, batch=0)

    def _engine(self, job: Job) -> tuple[Engine, int | None]:
        """How to read on, and up to which epoch."""
        plan, position = self._plan, self.position

        def make(whose: Job) -> tuple[Engine, bool]:
            return choose(
                plan.policy,
                whose,
                plan.order.spec,
                provenance=plan.provenance,
                gate=None if plan.stagger is None else self._gate,
            )

        if plan.node.members == 1:
            engine, stays = make(job)
            return engine, position.until if stays else position.epoch + 1
        node = plan.node.at(
            plan.index.file, plan.index.database, plan.order.spec, position, plan.worker
        )
        schedule, until = self._schedule, position.until

        def parts(ranks: Sequence[int], first: int) -> Iterator[list[Ints]]:
            start = schedule.later(position, first)
            return (asked.parts for asked in schedule.batches(start, until, ranks))

        # Readers that take turns count their batches, and one that begins anew would count anew.
        takeover = plan.stagger is None
        shared = Shared(
            job, node, plan.rank, lambda whose: make(whose)[0], parts, takeover=takeover
        )
        return shared, until

    def _gate(self) -> Gate:
        """Where the readers of all hosts take turns, each host or rank being one of them."""
        from sapwood.data.stagger import Gate  # needs torch, which reading alone does not

        plan, members = self._plan, self._plan.node.members
        assert plan.stagger is not None
        return Gate(
            plan.stagger,
            f"{plan.index.fingerprint}/{plan.order.spec}/{self.position}/{plan.worker}",
            number=plan.rank // members,
            readers=-(-plan.world // members),
            timeout=plan.settings.timeout,
        )

    def _wanted(self, position: Position, stop: int | None) -> Iterator[Ints]:
        """The records of each batch that are this rank's, up to an epoch."""
        for asked in self._schedule.batches(position, stop, [self._plan.rank]):
            self._asked.append(asked)
            yield asked.parts[0]

    def _decode(self, decode: Callable[[Batch], Any], batch: Batch) -> Any:
        return decode_batch(decode, batch, f"batch {batch.number} of epoch {batch.epoch}, ")

    def _batch(self, data: NDArray[np.uint8]) -> Batch:
        # Only now is it known that the bytes are of the state of which the index is.
        self._source.check()
        epoch, number, (records,) = self._asked.popleft()
        index = self._plan.index
        self._recorder.batch(len(records), len(data))
        if number == self._plan.order.batches // 2:
            self._recorder.halfway()
        return Batch(
            epoch=epoch,
            number=number,
            index=records,
            lengths=index.lengths_of(records),
            data=data,
            places=KeyPlaces(index, records),
        )
