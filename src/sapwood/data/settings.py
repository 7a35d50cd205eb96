"""What a reader is told, checked, and what follows from it for one database."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, get_args

import numpy as np

from sapwood.data.batch import Batch
from sapwood.data.check import (
    database_name,
    optional_callable,
    optional_int,
    require_bool,
    require_choice,
    require_instance,
    require_int,
    require_number,
    require_path,
)
from sapwood.data.engines import POLICIES, SHARED, EngineSettings, Policy
from sapwood.data.engines.base import MIB
from sapwood.data.index import Index, list_databases
from sapwood.data.node import Node
from sapwood.data.order import Chunks, Order, OrderSpec
from sapwood.data.order.spec import Scope, Shuffle, Tail
from sapwood.data.passes import Plan
from sapwood.data.provenance import Provenance
from sapwood.data.sidecar import open_index
from sapwood.errors import ConfigError, DataError

if TYPE_CHECKING:
    from sapwood.data.stagger import Stagger

__all__ = ["ReaderSettings", "Reuse"]

_log = logging.getLogger(__name__)

_MEMORY = 128 * MIB
_SMALLEST, _LARGEST = 1 * MIB, 8 * MIB


@dataclass(frozen=True, kw_only=True)
class Reuse:
    """How often records are used while they are in memory, and who exchanges them."""

    factor: int = 2
    """How often each record is used before new ones are read; an epoch is as much longer."""
    scope: Scope = "process"
    """Records change places with those of the same stream, of a node's streams, or of all."""
    node_streams: int = 4
    """How many streams are a node; the order must not depend on how many ranks one really has."""

    def __post_init__(self) -> None:
        """Refuse what makes no order.

        Raises:
            ConfigError: a number is below 1, or the scope is unknown.
        """
        for name in ("factor", "node_streams"):
            _set(self, name, require_int(name, getattr(self, name), least=1))
        require_choice("scope", self.scope, get_args(Scope))


@dataclass(frozen=True, kw_only=True)
class ReaderSettings:
    """The arguments of a reader; see there."""

    path: str | os.PathLike[str]
    batch_size: int
    database: str | bytes | None
    shuffle: Shuffle
    seed: int
    epochs: int | None
    tail: Tail
    decode: Callable[[Batch], Any] | None
    policy: Policy
    share: bool
    streams: int
    window: int
    reuse: Reuse | None
    chunk: int | None
    memory: int | None
    threads: int
    timeout: float
    rank: int
    world: int
    node: Node
    index: str | os.PathLike[str] | None
    provenance: Provenance | None
    stagger: Stagger | None

    def __post_init__(self) -> None:
        """Refuse what makes no sense.

        Raises:
            ConfigError: an argument is wrong, or two do not go together.
        """
        self._check_types()
        if not 0 <= self.rank < self.world:
            raise ConfigError(
                f"rank={self.rank}, world={self.world}: expected a rank from 0 to world - 1"
            )
        if self.batch_size < self.world:
            raise ConfigError(
                f"batch_size={self.batch_size} is the batch of all {self.world} ranks together: "
                "expected one record for each at least"
            )
        if self.epochs is not None and self.epochs < 1:
            raise ConfigError(f"epochs={self.epochs}: expected 1 or more, or None for no end")
        for name, known in (
            ("policy", POLICIES),
            ("shuffle", get_args(Shuffle)),
            ("tail", get_args(Tail)),
        ):
            require_choice(name, getattr(self, name), known)
        if self.reuse is not None and self.shuffle != "reuse":
            raise ConfigError(f"reuse= is for shuffle='reuse', and that is {self.shuffle!r}")
        if self.streams < 1 or self.window < 1:
            raise ConfigError(
                f"streams={self.streams}, window={self.window}: expected 1 or more of both"
            )

    def _check_types(self) -> None:
        require_path("path", self.path)
        if self.index is not None:
            require_path("index", self.index)
        database_name(self.database)
        for name in ("batch_size", "seed", "streams", "window", "threads", "rank", "world"):
            _set(self, name, require_int(name, getattr(self, name)))
        for name in ("epochs", "chunk", "memory"):
            _set(self, name, optional_int(name, getattr(self, name)))
        require_number("timeout", self.timeout)
        require_bool("share", self.share)
        optional_callable("decode", self.decode)
        require_instance("reuse", self.reuse, Reuse, none=True)
        require_instance("provenance", self.provenance, Provenance, none=True)

    def plan(self) -> Plan:
        """Open the index, and draw up all that follows.

        Raises:
            ConfigError: the order cannot be made.
            DataError: the database is damaged, or has no records.
        """
        if self.memory is not None and self.memory * self.world < self.window:
            _log.warning(
                "memory=%d of %d ranks is less than window=%d: chunks will be read several times",
                self.memory,
                self.world,
                self.window,
            )
        index = open_index(self.path, self.database, file=self.index)
        if not len(index):
            raise _no_records(index)
        nbytes = _chunk_bytes(index) if self.chunk is None else self.chunk
        chunks = Chunks.of(index.offsets, index.lengths, nbytes)
        node = self.node if self.share or self.policy in SHARED else Node()
        return Plan(
            index=index,
            chunks=chunks,
            reads=self._reads(index, chunks, node),
            order=Order(self._spec(chunks), chunks),
            policy=self.policy,
            settings=EngineSettings(
                memory=max(_MEMORY, 2 * self.window) if self.memory is None else self.memory,
                threads=self.threads,
                timeout=self.timeout,
            ),
            provenance=self.provenance,
            stagger=self.stagger,
            decode=self.decode,
            rank=self.rank,
            world=self.world,
            node=node,
        )

    def _reads(self, index: Index, chunks: Chunks, node: Node) -> Chunks:
        """What is read at once: chunks, unless other readers need the most of each."""
        number, readers = self.rank // node.members, -(-self.world // node.members)
        if self.shuffle != "none" or readers == 1 or chunks.records is not None:
            return chunks
        first, last = (
            min(one * node.members, self.world) * self.batch_size // self.world
            for one in (number, number + 1)
        )
        row = np.arange(len(index)) % self.batch_size
        mine = (row >= first) & (row < last)
        return Chunks.of(index.offsets, index.lengths, chunks.nbytes, ends=mine[1:] != mine[:-1])

    def _spec(self, chunks: Chunks) -> OrderSpec:
        apart = self.shuffle in ("window", "reuse")
        streams = min(self.streams, self.batch_size) if apart else 1
        reuse = Reuse(factor=1) if self.shuffle != "reuse" else self.reuse or Reuse()
        return OrderSpec(
            batch=self.batch_size,
            shuffle=self.shuffle,
            seed=self.seed,
            tail=self.tail,
            streams=streams,
            window=max(int(self.window / streams / chunks.each), 1) if apart else 1,
            factor=reuse.factor,
            scope=reuse.scope,
            cell=reuse.node_streams,
        )


def _set(settings: object, name: str, value: object) -> None:
    """Numbers of numpy become Python's, so that states and messages have no others."""
    object.__setattr__(settings, name, value)


def _no_records(index: Index) -> DataError:
    if index.database is not None:
        return DataError(
            f"{index.file}: {index.database.decode(errors='replace')!r} has no records"
        )
    named = [one.decode(errors="replace") for one in sorted(list_databases(index.file))]
    hint = f"; choose one of its others with database=: {', '.join(named[:10])}" if named else ""
    return DataError(f"{index.file}: the main database has no records{hint}")


def _chunk_bytes(index: Index) -> int:
    """Some records in each, so that little is read twice; it must follow from the file alone."""
    mean = int(index.lengths.mean()) if len(index) else 0
    size = _SMALLEST
    while size < min(4 * mean, _LARGEST):
        size *= 2
    return size
