"""The bytes of a checkpoint's tensors, put together from shards, every range verified."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

from sapwood.cli.verbs.ckpt.survey import Checkpoint, Copy
from sapwood.errors import CheckpointError, SapwoodError
from sapwood.state.catalog import Catalog, Entry
from sapwood.state.packed import unpack
from sapwood.tiers.base import Stored, StoredShard, read_range
from sapwood.tiers.record import EXTRAS, Range

__all__ = ["Content", "choose", "gaps"]

Key = tuple[str, str]


@dataclass(frozen=True)
class _Part:
    """A range, and the shard it is in."""

    start: int
    """Offset in the tensor."""
    rank: int
    number: int
    """Which of the shard's ranges."""
    nbytes: int


class Content:
    """Reads tensors of one checkpoint, from whichever copy of a shard is sound."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        """Nothing is read yet.

        Raises:
            CheckpointError: the checkpoint is not whole, or has gaps.
        """
        self.checkpoint = checkpoint
        self.record = checkpoint.readable()
        self.catalog = self.record.catalog
        missing = gaps(checkpoint)
        if missing:
            raise CheckpointError(f"checkpoint {checkpoint.id} has gaps: {'; '.join(missing)}")
        self._parts = _parts(checkpoint)
        self._open: dict[tuple[str, int], StoredShard] = {}

    def tied(self) -> dict[Key, Entry]:
        """Further names of the model's tied tensors, and the entry each stands for."""
        names = self.record.extras.get("tied", {})  # checkpoints of older versions have none
        known = self.catalog.by_key
        return {
            ("model", other): known["model", name]
            for other, name in names.items()
            if ("model", name) in known and ("model", other) not in known
        }

    def with_tied(self) -> Catalog:
        """The catalog with every name a state dict has; a tied tensor is in it once per name."""
        more = (replace(entry, name=key[1]) for key, entry in self.tied().items())
        return Catalog((*self.catalog.entries, *more))

    def blocks(self, key: Key) -> Iterator[memoryview]:
        """A tensor's bytes in order; a block is valid until the next one.

        Raises:
            CheckpointError: a range is damaged in every copy there is.
        """
        buffer = memoryview(bytearray(self.record.range_bytes))
        for part in self._parts[key]:
            self._read(part, buffer[: part.nbytes])
            yield buffer[: part.nbytes]

    def read(self, key: Key) -> bytearray:
        """All bytes of a tensor."""
        whole = bytearray(self.catalog.by_key[key].nbytes)
        memory = memoryview(whole)
        for part in self._parts[key]:
            self._read(part, memory[part.start : part.start + part.nbytes])
        return whole

    def extras(self) -> dict[str, Any]:
        """What was saved beside tensors and is the same on every rank, for ``from_plain``.

        Raises:
            CheckpointError: it is damaged in every copy there is.
        """
        record = self.record
        region = memoryview(bytearray(record.extras_bytes))
        first = len(record.ranges) - len(record.extras_ranges)
        for number, one in enumerate(record.extras_ranges, first):
            part = _Part(one.start, record.rank, number, one.nbytes)
            self._read(part, region[one.start : one.start + one.nbytes])
        return unpack(record.extras, region)

    def close(self) -> None:
        """Close every shard."""
        for shard in self._open.values():
            shard.close()
        self._open.clear()

    def __enter__(self) -> Content:
        """Close at the end of a ``with`` block."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close."""
        self.close()

    def _read(self, part: _Part, out: Any) -> None:
        problems = []
        for copy in self.checkpoint.copies:
            if copy.rank != part.rank or copy.record is None:
                continue
            try:
                shard = self._shard(copy)
                read_range(shard, shard.record.ranges[part.number], out)
                return
            except SapwoodError as error:
                problems.append(f"{copy.place.label}: {error}")
        raise CheckpointError("; ".join(problems))

    def _shard(self, copy: Copy) -> StoredShard:
        where = copy.place.label, copy.rank
        if where not in self._open:
            self._open[where] = copy.place.tier.open(Stored(self.checkpoint.id, copy.rank))
        return self._open[where]


def choose(catalog: Catalog, pattern: str | None, files: tuple[str, ...] = ()) -> list[Entry]:
    """The tensors whose name fits a pattern such as ``layers.0.*``; all without one.

    Raises:
        CheckpointError: none fits.
    """
    entries = [e for e in catalog.entries if not files or e.file in files]
    fitting = [e for e in entries if pattern is None or _fits(e, pattern)]
    if not fitting and pattern is not None:
        some = ", ".join(e.name for e in entries[:5])
        raise CheckpointError(f"no tensor fits {pattern!r}; there are {some}, ...")
    return fitting


def _fits(entry: Entry, pattern: str) -> bool:
    return fnmatchcase(entry.name, pattern) or fnmatchcase(f"{entry.file} {entry.name}", pattern)


def gaps(checkpoint: Checkpoint) -> list[str]:
    """Bytes of tensors that are in no shard, or in two, one sentence each."""
    record = checkpoint.readable()
    held = _parts(checkpoint)
    found = []
    for entry in record.catalog.entries:
        at = 0
        for part in held[entry.key]:
            if part.start != at:
                word = "in no shard" if part.start > at else "in two shards"
                low, high = sorted((at, part.start))
                found.append(f"bytes {low} to {high} of {entry.file} {entry.name} are {word}")
            at = part.start + part.nbytes
        if at < entry.nbytes:
            end = f"bytes {at} to {entry.nbytes} of {entry.file} {entry.name}"
            found.append(f"{end} are in no shard")
    return found


def _parts(checkpoint: Checkpoint) -> dict[Key, list[_Part]]:
    record = checkpoint.readable()
    parts: dict[Key, list[_Part]] = {entry.key: [] for entry in record.catalog.entries}
    for rank, held in checkpoint.records.items():
        for number, one in enumerate(held.ranges):
            if one.piece.file != EXTRAS:
                parts[one.piece.key].append(_Part(_start(one), rank, number, one.nbytes))
    for rows in parts.values():
        rows.sort(key=lambda part: part.start)
    return parts


def _start(one: Range) -> int:
    return one.piece.start + one.start
