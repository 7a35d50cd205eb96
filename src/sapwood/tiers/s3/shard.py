"""Reading a shard from a bucket: from its own object, or from the files it became a part of.

It reads ahead, the further the longer it is read in order: a tiny tensor costs one small request,
and many tiny tensors do not cost one each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from sapwood.errors import CheckpointError, StorageError
from sapwood.storage.s3.objects import Objects
from sapwood.tiers.record import EXTRAS, Range, ShardRecord

__all__ = ["S3Shard", "data_name", "extras_name", "file_place"]

_FIRST_BLOCK, _LAST_BLOCK = 2**20, 32 * 2**20
_SPAN = 4 * 2**20
"""Longer runs are asked for in several requests, side by side."""
_GAP = 64 * 2**10
"""Reading so much of others' bytes is cheaper than another request."""


def data_name(record: ShardRecord) -> str:
    """The object of a shard's bytes, as long as they are not in the files."""
    return f"{record.id.folder}/shard-{record.rank}.bin"


def extras_name(record: ShardRecord) -> str:
    """The object of the bytes that a shard's extras refer to; they are never in the files."""
    return f"{record.id.folder}/shard-{record.rank}.extras"


def file_place(record: ShardRecord, part: Range) -> tuple[str, int]:
    """The object and offset where a range is in the published files."""
    layout = record.catalog.layouts[part.piece.file]
    name = f"{record.id.folder}/{layout.filename}"
    return name, layout.start(part.piece.name) + part.piece.start + part.start


@dataclass(slots=True)
class _Span:
    """Bytes of one object that are read in one request."""

    name: str
    start: int
    stop: int
    held: list[tuple[int, int, int]] = field(default_factory=list)
    """Ranges in it: their key, offset in the object, and size."""


class S3Shard:
    """A shard in a bucket. Fulfils ``StoredShard``."""

    def __init__(self, objects: Objects, record: ShardRecord, *, published: bool) -> None:
        """Made by ``S3Tier``; ``published``: its bytes are in the files."""
        self.record = record
        self._objects = objects
        self._published = published
        self._numbers = {part.at: number for number, part in enumerate(record.ranges)}
        self._ahead: dict[int, memoryview] = {}
        self._upto = 0
        self._block = _FIRST_BLOCK

    def read_into(self, part: Range, out: Any) -> None:
        """Read a range, from what was read ahead if it is there."""
        target = memoryview(out).cast("B")
        if not target:
            return
        if part.at not in self._ahead:
            self._fetch(self._numbers[part.at])
        target[:] = self._ahead[part.at]

    def close(self) -> None:
        """Forget what was read ahead."""
        self._ahead = {}

    def _fetch(self, number: int) -> None:
        self._block = min(2 * self._block, _LAST_BLOCK) if number == self._upto else _FIRST_BLOCK
        self._ahead = {}
        try:
            self._upto = self._read(number)
        except FileNotFoundError:
            # Its own object went, because the files were published meanwhile.
            self._published = not self._published
            try:
                self._upto = self._read(number)
            except FileNotFoundError as error:
                what = f"shard {self.record.rank} of {self.record.id}"
                raise CheckpointError(f"the bytes of {what} are not there: {error}") from error

    def _read(self, first: int) -> int:
        """Read some ranges; the number of the one behind them."""
        spans, upto = self._spans(first)
        for name in {span.name for span in spans}:
            mine = [span for span in spans if span.name == name]
            wanted = [(s.start, memoryview(bytearray(s.stop - s.start))) for s in mine]
            try:
                self._objects.read_all(name, wanted, coalesce=0)
            except (StorageError, ValueError) as error:
                raise CheckpointError(f"cannot read {name}: {error}") from error
            for span, (_, block) in zip(mine, wanted, strict=True):
                for at, offset, nbytes in span.held:
                    begin = offset - span.start
                    self._ahead[at] = block[begin : begin + nbytes]
        return upto

    def _spans(self, first: int) -> tuple[Sequence[_Span], int]:
        """What to read from range ``first`` on, and the number of the first that is left."""
        parts = self.record.ranges
        spans: dict[str, list[_Span]] = {}
        cost, number = 0, first
        while number < len(parts) and (
            number == first or cost + parts[number].nbytes < self._block
        ):
            part = parts[number]
            name, offset = self._place(part)
            end = offset + part.nbytes
            known = spans.setdefault(name, [])
            last = known[-1] if known else None
            if last and 0 <= offset - last.stop <= _GAP and end - last.start <= _SPAN:
                cost += end - last.stop
                last.stop = end
            else:
                last = _Span(name, offset, end)
                known.append(last)
                cost += part.nbytes
            last.held.append((part.at, offset, part.nbytes))
            number += 1
        return [span for found in spans.values() for span in found], number

    def _place(self, part: Range) -> tuple[str, int]:
        if part.piece.file == EXTRAS:
            return extras_name(self.record), part.start
        if self._published:
            return file_place(self.record, part)
        return data_name(self.record), part.at
