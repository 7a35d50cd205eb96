"""The reader: batches of an LMDB database, for one rank of a training."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from multiprocessing.context import get_spawning_popen
from multiprocessing.reduction import DupFd
from typing import Any
from weakref import WeakSet

from torch.utils.data import IterableDataset, get_worker_info

from sapwood.data.batch import Batch
from sapwood.data.check import require_instance, require_int
from sapwood.data.engines import Policy
from sapwood.data.engines.base import MIB
from sapwood.data.engines.spare import Spare
from sapwood.data.node import Node
from sapwood.data.order import Quality, quality_of
from sapwood.data.order.spec import Shuffle, Tail
from sapwood.data.pagefile import Fingerprint
from sapwood.data.passes import Pass, Plan
from sapwood.data.position import Position, from_state, to_state
from sapwood.data.provenance import Provenance
from sapwood.data.settings import ReaderSettings, Reuse
from sapwood.data.stagger import Stagger
from sapwood.data.stats import ReadStats, Recorder
from sapwood.data.workers import Copy, Refused, Seat, SharedPosition
from sapwood.errors import ConfigError, DataError, SapwoodError, UsageError
from sapwood.runtime.launch import detect
from sapwood.trace import OFF, Tracer

__all__ = ["LmdbReader"]

_log = logging.getLogger(__name__)


class LmdbReader(IterableDataset[Any]):
    """Batches of records from an LMDB database, for this rank.

    Every rank makes one, with the same arguments. A batch has ``batch_size`` records over all
    ranks, and each rank gets its part: the same batches come out on any number of ranks. The
    reader has a position, which ``state_dict`` keeps: a ``for`` loop goes on where the last one
    stopped, be it in the middle of an epoch, and ends after ``epochs`` epochs.

    Behind a DataLoader with workers each loop is the next ``epochs`` epochs, and the position is
    known to torchdata's StatefulDataLoader only; here asking for it is an error then.

    Example:
        reader = LmdbReader("train.mdb", batch_size=256, shuffle="window", seed=0)
        for batch in reader:
            train(batch.tensor)
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        batch_size: int,
        *,
        database: str | bytes | None = None,
        shuffle: Shuffle = "window",
        seed: int = 0,
        epochs: int | None = 1,
        tail: Tail = "pad",
        decode: Callable[[Batch], Any] | None = None,
        policy: Policy = "auto",
        share: bool = False,
        streams: int = 16,
        window: int = 64 * MIB,
        reuse: Reuse | None = None,
        chunk: int | None = None,
        memory: int | None = None,
        threads: int = 4,
        timeout: float = 120.0,
        rank: int | None = None,
        world: int | None = None,
        index: str | os.PathLike[str] | None = None,
        provenance: Provenance | None = None,
        stagger: Stagger | None = None,
        trace: Tracer = OFF,
    ) -> None:
        """Open the index of the database, or make it; nothing else is read yet.

        Args:
            path: An LMDB file, or a folder with data.mdb in it.
            batch_size: Records of a batch, over all ranks.
            database: A named database; the main one if none is given.
            shuffle: ``none``: the order of keys. ``window``: chunks of the file in any order, and
                records inside of windows of them. ``global``: records in any order. ``reuse``: as
                ``window``, but what is in memory is used several times; see ``reuse``.
            seed: Another seed is another order.
            epochs: How many epochs one ``for`` loop has; None is without end.
            tail: The last batch of an epoch if records are left over. ``pad``: filled up with the
                first of the epoch. ``drop``: left out. ``keep``: shorter, and some ranks may get
                an empty part.
            decode: Turns a batch into what the training uses. If it raises, it is called again with
                parts of the batch, to find the record.
            policy: How records are read; ``auto`` is the fastest way for this machine.
            share: One rank of each host reads for the others there, through shared memory; if it
                dies or leaves, the next one does. All must then iterate alike, and ranks be found
                from the launcher.
            streams: Into how many shares a batch is divided that are read apart. As many as there
                may be ranks, or a multiple of that, is best. It is part of the order.
            window: Bytes that are shuffled together, over all ranks. It is part of the order.
            reuse: With ``shuffle="reuse"``.
            chunk: Bytes of a request; by default 1 to 8 MiB, by the length of records. It is part
                of the order.
            memory: Bytes of the ring chunks are read into; by default 128 MiB, or twice the window.
                One chunk with a record that goes beyond its end is the least.
            threads: How many requests are in flight.
            timeout: Seconds one request may take.
            rank: This rank; found from the launcher by default.
            world: How many ranks there are; found from the launcher by default.
            index: Where the index is kept, other than beside the database.
            provenance: How the database was written, for ``policy="prov"``.
            stagger: Where readers take turns, for ``policy="stag"``.
            trace: Where times and counts are recorded.

        Raises:
            ConfigError: arguments are of wrong types or make no sense.
            DataError: the database is damaged or has no records.
        """
        if share and rank is not None:
            raise ConfigError(
                f"share=True with rank={rank}: which ranks share a host is known from the launcher "
                "only; leave rank and world out"
            )
        require_instance("stagger", stagger, Stagger, none=True)
        require_instance("trace", trace, Tracer)
        rank, world, node = _place(rank, world)
        self._settings = ReaderSettings(
            path=path,
            batch_size=batch_size,
            database=database,
            shuffle=shuffle,
            seed=seed,
            epochs=epochs,
            tail=tail,
            decode=decode,
            policy=policy,
            share=share,
            streams=streams,
            window=window,
            reuse=reuse,
            chunk=chunk,
            memory=memory,
            threads=threads,
            timeout=timeout,
            rank=rank,
            world=world,
            node=node,
            index=index,
            provenance=provenance,
            stagger=stagger,
        )
        self._planned: Plan | SapwoodError = self._settings.plan()
        self._begin(Position(), trace, SharedPosition(Position()))
        _log.info("%s: shuffle %s: %s", self.path, shuffle, self.quality)

    def _begin(self, position: Position, trace: Tracer, shared: SharedPosition) -> None:
        self._recorder = Recorder(trace)
        self._spare = Spare()
        self._kept = position
        self._live: Pass | None = None
        self._shared, self._serial = shared, shared.serial
        self._loops = 0
        """How many loops this is a DataLoader's copy in, or was."""
        self._loaded = False
        """Whether a worker was told its position there, since its last loop."""
        self._last: Position | None = None
        _watch_forks(self)

    @property
    def _plan(self) -> Plan:
        if isinstance(self._planned, SapwoodError):
            raise self._planned
        return self._planned

    def __getstate__(self) -> dict[str, Any]:
        """Arguments and position: a copy opens the database by itself, and records no trace.

        One for a process that is being started also gets the memory that workers share.
        """
        spawning = get_spawning_popen() is not None
        self._own()
        if not spawning:  # a worker asks the shared memory where to begin; any other copy cannot
            self._require_known("__getstate__()")
        state = {
            "settings": self._settings,
            "position": self._position,
            "fingerprint": self._plan.index.fingerprint,
            "order": self._state_of(Position())["order"],
        }
        if spawning:
            state["shared"] = DupFd(self._shared.fd)
            state["serial"] = self._serial
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Open the database in this process.

        Raises:
            DataError: it is not the database of which the position is.
        """
        self._settings = state["settings"]
        spawned = "shared" in state
        position = state["position"]
        shared = SharedPosition.attach(state["shared"].detach()) if spawned else None
        self._begin(position, OFF, shared or SharedPosition(position))
        self._serial = state["serial"] if spawned else self._serial
        try:
            self._planned = self._settings.plan()
            self._check_same(state["fingerprint"] if spawned else None, state["order"])
        except SapwoodError as error:
            if not spawned:
                raise
            # A process that ends while it starts says nothing; its first batch does.
            self._planned = error

    def _check_same(self, fingerprint: Fingerprint | None, order: dict[str, Any]) -> None:
        """The database must be the one that was copied; one that was only moved has its layout."""
        index = self._plan.index
        same = fingerprint in (None, index.fingerprint)
        if not same or self._state_of(Position())["order"] != order:
            raise DataError(
                f"{index.file}: the database was changed after the reader was made, of which this "
                "is a copy; make a new reader"
            )

    @property
    def path(self) -> str:
        """The file that is read."""
        return str(self._plan.index.file)

    @property
    def records(self) -> int:
        """How many records the database has."""
        return len(self._plan.index)

    @property
    def batches(self) -> int:
        """How many batches an epoch has, on every rank."""
        return self._plan.order.batches

    @property
    def epoch(self) -> int:
        """The epoch of the batch that comes next.

        Raises:
            UsageError: workers of a DataLoader read, and it is not known here.
        """
        self._require_known("epoch")
        return self._position.epoch

    @property
    def quality(self) -> Quality:
        """How good the shuffle is."""
        return quality_of(self._plan.order.spec, self._plan.chunks)

    def stats(self) -> ReadStats:
        """What reading has cost so far, on this rank and in this process."""
        return self._recorder.snapshot()

    def __len__(self) -> int:
        """How many batches one ``for`` loop over whole epochs has.

        Raises:
            TypeError: it has no end.
        """
        if self._settings.epochs is None:
            raise TypeError("a reader with epochs=None has no end, and so no length")
        return self._settings.epochs * self.batches

    def __iter__(self) -> Iterator[Any]:
        """Go on from the position; a pass that was left is closed.

        In a worker of a DataLoader: the next epochs, of which each worker has some batches.
        """
        info = get_worker_info()
        if info is not None:
            seat = Seat(
                seed=info.seed - info.id,
                loop=self._loops,
                worker=info.id,
                workers=info.num_workers,
            )
            return self._iterate_as(seat)
        self._own()
        self._leave("another loop over the reader has begun")
        self._keep(self._kept.begun(self._settings.epochs))
        self._live = Pass(
            self._plan, self._kept, self._recorder, self._spare, moved=self._shared.follow
        )
        return self._live

    def _iterate_as(self, seat: Seat) -> Iterator[Any]:
        try:
            if not seat.loop:  # what was inherited from the training's process is not counted here
                self._recorder = Recorder()
            self._loops += 1
            self._leave("another loop over the reader has begun")
            plan = replace(self._plan, worker=seat.worker, workers=seat.workers)
            copy = Copy(
                position=self._kept, serial=self._serial, loaded=self._loaded, last=self._last
            )
            self._kept, self._serial = self._shared.begin(
                seat, copy, batches=self.batches, epochs=self._settings.epochs
            )
            self._last, self._loaded = self._kept, False
            self._live = Pass(
                plan,
                self._kept,
                self._recorder,
                self._spare,
                ended=partial(self._shared.end, seat),
            )
        except SapwoodError as error:
            return Refused(error)
        return self._live

    def set_epoch(self, epoch: int) -> None:
        """Go to the beginning of an epoch.

        Workers of a DataLoader go there with their next loop.

        Raises:
            ConfigError: there is no such epoch.
        """
        epoch = require_int("epoch", epoch, least=0)
        self._leave("set_epoch was called")
        self._keep(Position(epoch=epoch, until=epoch))

    def state_dict(self) -> dict[str, Any]:
        """The position after the last batch that was given out: a few numbers, of no rank.

        Raises:
            UsageError: workers of a DataLoader read, and it is not known here.
        """
        self._require_known("state_dict()")
        return self._state_of(self._position)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to a position, on any number of ranks.

        Raises:
            ConfigError: it is no state of a reader, of another order, or of another worker.
        """
        plan, epochs = self._plan, self._settings.epochs
        position = _fitting(from_state(state, plan.order, plan.chunks, epochs))
        self._leave("load_state_dict was called")
        self._keep(position)

    def _state_of(self, position: Position) -> dict[str, Any]:
        plan = self._plan
        return to_state(position, plan.order.spec, plan.chunks, self._settings.epochs)

    def close(self) -> None:
        """End the threads of the pass that runs, and give memory back; the position stays."""
        self._leave("the reader was closed")
        self._spare.drop()

    def _leave(self, why: str) -> None:
        if self._live is not None:
            self._kept = self._live.position
            self._live.close(why)
            self._live = None

    def _keep(self, position: Position) -> None:
        self._kept = position
        if get_worker_info() is not None:
            self._loaded = True
            return
        self._own()
        self._serial = self._shared.set(position)

    def _own(self) -> None:
        """A forked process that is no worker reads for itself, and shares nothing with another."""
        if get_worker_info() is None and self._shared.owner != os.getpid():
            self._shared = self._shared.copied()

    def _require_known(self, what: str) -> None:
        self._own()
        if get_worker_info() is None and self._shared.passed_on:
            raise UsageError(
                f"reader.{what}: workers of a DataLoader read with copies of this reader, some "
                "batches ahead, and which of those the training has got is not known here. Use "
                "torchdata's StatefulDataLoader and its state_dict(), or num_workers=0: the reader "
                "has threads of its own. set_epoch(n) makes the position known again"
            )

    @property
    def _position(self) -> Position:
        return self._kept if self._live is None else self._live.position


_readers: WeakSet[LmdbReader] = WeakSet()
_watching = False


def _watch_forks(reader: LmdbReader) -> None:
    global _watching
    _readers.add(reader)
    if not _watching:
        os.register_at_fork(before=_own_all)
        _watching = True


def _own_all() -> None:
    """Before a fork, which may be that of a worker: it is to share what this process owns."""
    for reader in list(_readers):
        reader._own()


def _fitting(position: Position) -> Position:
    """A position that was loaded, if this process can go on from it."""
    info = get_worker_info()
    here = (0, 1) if info is None else (info.id, info.num_workers)
    if position.origin is None or (info is None and position.workers == 1):
        return replace(position, origin=None, worker=0, workers=1)
    # In a worker a state of an older release is taken for its own: the loader has seen to that.
    unknown = info is not None and not position.workers
    if not unknown and (position.worker, position.workers) != here:
        of = f"worker {position.worker} of {position.workers or 'several'} of a DataLoader"
        raise ConfigError(
            f"the state is that of {of}, which has only some of the batches, and this is worker "
            f"{here[0]} of {here[1]}; give the whole state to a StatefulDataLoader with as many "
            "workers, or begin an epoch with set_epoch"
        )
    return position


def _place(rank: int | None, world: int | None) -> tuple[int, int, Node]:
    if (rank is None) != (world is None):
        raise ConfigError(f"rank={rank}, world={world}: give both, or none to ask the launcher")
    if rank is None or world is None:
        here = detect()
        return here.rank, here.world, Node.of(here)
    return rank, world, Node()
