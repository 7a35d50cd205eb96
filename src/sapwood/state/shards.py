"""Who saves what: each rank a slice of every large tensor, and small tensors whole.

Slicing a small tensor costs more than it saves (DeepFreeze saw it on ResNet-50), so small ones are
packed whole, each on the holder that has least to do so far.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from sapwood.state.catalog import Catalog, Entry

__all__ = ["Piece", "Shard", "ShardPlan", "plan_shards"]

ALIGNMENT = 64
"""Slices and places in staging memory begin at multiples of this: a cache line."""
SMALL_SLICE = 64 * 1024
"""A tensor whose slices would be smaller than this is not sliced."""
PAGE = 4096
LARGE_PIECE = 512 * 1024
"""A piece from this size on lies in memory as it will in its file, counted from a page's begin,
and is cut at the file's pages: so it can go to the device without another copy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Some bytes of one tensor, and their place in the shard's memory."""

    file: str
    name: str
    start: int
    stop: int
    at: int
    """Offset in the shard."""

    @property
    def key(self) -> tuple[str, str]:
        """The tensor's file and name."""
        return self.file, self.name

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.stop - self.start


@dataclass(frozen=True)
class Shard:
    """What one rank saves."""

    rank: int
    pieces: tuple[Piece, ...]

    @property
    def nbytes(self) -> int:
        """Size of the shard's memory, gaps included."""
        if not self.pieces:
            return 0
        last = self.pieces[-1]
        return _up(last.at + last.nbytes, ALIGNMENT)

    @property
    def extras_at(self) -> int:
        """Where what is saved beside tensors begins in the shard's memory: at the next page."""
        return _up(self.nbytes, PAGE)

    def nbytes_with(self, extras: int) -> int:
        """Size of the shard's memory with so many bytes of what is saved beside tensors."""
        return self.extras_at + extras if extras else self.nbytes

    def to_json(self, catalog: Catalog) -> list[list[int]]:
        """Its pieces as plain values; they name tensors by their place in the catalog."""
        index = {entry.key: n for n, entry in enumerate(catalog.entries)}
        return [[index[p.key], p.start, p.stop, p.at] for p in self.pieces]

    @classmethod
    def from_json(cls, rank: int, catalog: Catalog, rows: Any) -> Shard:
        """The reverse of ``to_json``.

        Raises:
            ValueError, TypeError, IndexError: these are no pieces of the catalog's tensors.
        """
        pieces = []
        for number, start, stop, at in rows:
            entry = catalog.entries[number]
            if not 0 <= start <= stop <= entry.nbytes or at < 0:
                raise ValueError(f"a piece of {entry.name} lies outside it")
            pieces.append(Piece(file=entry.file, name=entry.name, start=start, stop=stop, at=at))
        return cls(rank, tuple(pieces))

    @cached_property
    def by_key(self) -> Mapping[tuple[str, str], Piece]:
        """Pieces by tensor: a rank has at most one of each."""
        return {piece.key: piece for piece in self.pieces}


@dataclass(frozen=True)
class ShardPlan:
    """The shards of all ranks; together they hold every byte of the catalog once."""

    catalog: Catalog
    shards: tuple[Shard, ...]


def plan_shards(catalog: Catalog, world: int) -> ShardPlan:
    """Share the catalog's bytes over its holders; every rank computes the same plan."""
    loads = [0] * world
    cuts: dict[tuple[str, str], list[tuple[int, int, int]]] = {}
    small: list[Entry] = []
    for entry in catalog.entries:
        if entry.nbytes < SMALL_SLICE * len(entry.holders):
            small.append(entry)
            continue
        cuts[entry.key] = _slices(entry.nbytes, entry.holders, _offset(catalog, entry))
        for rank, start, stop in cuts[entry.key]:
            loads[rank] += stop - start
    for entry in sorted(small, key=lambda e: (-e.nbytes, e.key)):
        rank = min(entry.holders, key=lambda r: (loads[r], r))
        cuts[entry.key] = [(rank, 0, entry.nbytes)]
        loads[rank] += max(entry.nbytes, ALIGNMENT)
    return ShardPlan(catalog, tuple(_shard(rank, catalog, cuts) for rank in range(world)))


def _offset(catalog: Catalog, entry: Entry) -> int:
    """Where the tensor begins in its file."""
    return catalog.layouts[entry.file].start(entry.name)


def _slices(nbytes: int, holders: Sequence[int], offset: int) -> list[tuple[int, int, int]]:
    """Equal slices of a tensor at ``offset`` of its file; the last one takes what is left."""
    step = -(-nbytes // len(holders))
    unit = PAGE if step >= LARGE_PIECE else ALIGNMENT
    cuts = [0, *(_up(offset + i * step, unit) - offset for i in range(1, len(holders)))]
    bounds = zip(holders, cuts, [*cuts[1:], nbytes], strict=True)
    return [(rank, start, min(stop, nbytes)) for rank, start, stop in bounds if start < nbytes]


def _shard(
    rank: int, catalog: Catalog, cuts: Mapping[tuple[str, str], list[tuple[int, int, int]]]
) -> Shard:
    pieces = []
    at = 0
    for entry in catalog.entries:
        for owner, start, stop in cuts[entry.key]:
            if owner == rank:
                if stop - start >= LARGE_PIECE:
                    at += (_offset(catalog, entry) + start - at) % PAGE
                pieces.append(
                    Piece(file=entry.file, name=entry.name, start=start, stop=stop, at=at)
                )
                at = _up(at + stop - start, ALIGNMENT)
    return Shard(rank, tuple(pieces))


def _up(n: int, unit: int) -> int:
    return -(-n // unit) * unit
