"""The reader: batches of an LMDB database, for one rank of a training."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from torch.utils.data import IterableDataset, get_worker_info

from sapwood.data.batch import Batch
from sapwood.data.engines import Policy
from sapwood.data.engines.base import MIB
from sapwood.data.engines.spare import Spare
from sapwood.data.node import Node
from sapwood.data.order import Quality, quality_of
from sapwood.data.order.spec import Shuffle, Tail
from sapwood.data.passes import Pass
from sapwood.data.position import Position, from_state, to_state
from sapwood.data.provenance import Provenance
from sapwood.data.settings import ReaderSettings, Reuse
from sapwood.data.stagger import Stagger
from sapwood.data.stats import ReadStats, Recorder
from sapwood.errors import ConfigError
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
            decode: Turns a batch into what the training uses.
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
            ConfigError: arguments make no sense.
            DataError: the database is damaged or has no records.
        """
        if share and rank is not None:
            raise ConfigError(
                f"share=True with rank={rank}: which ranks share a host is known from the launcher "
                "only; leave rank and world out"
            )
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
        self._open(Position(), trace)

    def _open(self, position: Position, trace: Tracer) -> None:
        self._plan = self._settings.plan()
        self._recorder = Recorder(trace)
        self._spare = Spare()
        self._kept = position
        self._live: Pass | None = None
        _log.info("%s: shuffle %s: %s", self.path, self._settings.shuffle, self.quality)

    def __getstate__(self) -> dict[str, Any]:
        """Arguments and position: a copy opens the database by itself, and records no trace."""
        return {"settings": self._settings, "position": self._position}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Open the database in this process."""
        self._settings = state["settings"]
        self._open(state["position"], OFF)

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
        """The epoch of the batch that comes next."""
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

    def __iter__(self) -> Pass:
        """Go on from the position; a pass that was left is closed."""
        position, epochs = self._position, self._settings.epochs
        self._leave()
        if position.until is not None and position.until <= position.epoch:
            until = None if epochs is None else position.epoch + epochs
            position = replace(position, until=until, origin=None)
        info = get_worker_info()
        plan = self._plan
        if info is not None:
            plan = replace(plan, worker=info.id, workers=info.num_workers)
            if position.origin is None:
                begun = position.epoch * self.batches + position.batch
                position = replace(position, origin=begun)
        else:
            position = replace(position, origin=None)
        self._live = Pass(plan, position, self._recorder, self._spare)
        return self._live

    def set_epoch(self, epoch: int) -> None:
        """Go to the beginning of an epoch.

        With a DataLoader that has workers call it before each epoch: they work on copies, and the
        reader here does not learn how far they got.
        """
        if epoch < 0:
            raise ConfigError(f"epoch={epoch}: expected 0 or more")
        self._leave()
        self._kept = Position(epoch=epoch, until=epoch)

    def state_dict(self) -> dict[str, Any]:
        """The position after the last batch that was given out: a few numbers, of no rank."""
        return to_state(self._position, self._plan.order.spec, self._plan.chunks)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to a position, on any number of ranks.

        Raises:
            ConfigError: it is of another order.
        """
        position = from_state(state, self._plan.order.spec, self._plan.chunks)
        self._leave()
        self._kept = position

    def close(self) -> None:
        """End the threads of the pass that runs, and give memory back; the position stays."""
        self._leave()
        self._spare.drop()

    def _leave(self) -> None:
        if self._live is not None:
            self._kept = self._live.position
            self._live.close()
            self._live = None

    @property
    def _position(self) -> Position:
        return self._kept if self._live is None else self._live.position


def _place(rank: int | None, world: int | None) -> tuple[int, int, Node]:
    if (rank is None) != (world is None):
        raise ConfigError(f"rank={rank}, world={world}: give both, or none to ask the launcher")
    if rank is None or world is None:
        here = detect()
        return here.rank, here.world, Node.of(here)
    return rank, world, Node()
