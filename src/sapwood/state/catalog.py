"""What a checkpoint holds, as bytes: every tensor has a file, a name and a place in that file.

Files are standard safetensors, so that any tool can read an assembled checkpoint. The layout
follows from the catalog alone: whoever knows the catalog knows the header and every offset, and
writers on different nodes need not talk to each other to fill one file.
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from sapwood.errors import CheckpointError

__all__ = ["DTYPE_BYTES", "Catalog", "Entry", "FileLayout"]

DTYPE_BYTES = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E5M2": 1,
    "F8_E4M3": 1,
    "I16": 2,
    "U16": 2,
    "F16": 2,
    "BF16": 2,
    "I32": 4,
    "U32": 4,
    "F32": 4,
    "C64": 8,
    "F64": 8,
    "I64": 8,
    "U64": 8,
}
"""Bytes per element, by safetensors' name of the dtype."""

_DATA_ALIGNMENT = 4096  # where a file's tensors begin: a page, for memory maps and direct I/O
_METADATA = {"format": "pt"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One tensor of a run's state."""

    file: str
    """``model`` or ``optimizer``; the file is ``<file>.safetensors``."""
    name: str
    dtype: str
    """safetensors' name of it."""
    shape: tuple[int, ...]
    holders: tuple[int, ...]
    """The ranks that hold the whole tensor; any of them can give any part of it."""

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]

    @property
    def key(self) -> tuple[str, str]:
        """File and name: unique in a catalog."""
        return self.file, self.name


class FileLayout:
    """Where the tensors of one file lie."""

    def __init__(self, file: str, entries: Iterable[Entry]) -> None:
        """``entries`` are those of this file; wide dtypes come first, so that all are aligned."""
        self.file = file
        self.entries = sorted(entries, key=lambda e: (-DTYPE_BYTES[e.dtype], e.name))
        offset = 0
        table: dict[str, Any] = {"__metadata__": _METADATA}
        starts = {}
        for entry in self.entries:
            starts[entry.name] = offset
            table[entry.name] = {
                "dtype": entry.dtype,
                "shape": list(entry.shape),
                "data_offsets": [offset, offset + entry.nbytes],
            }
            offset += entry.nbytes
        text = json.dumps(table, separators=(",", ":"), ensure_ascii=False).encode()
        padded = -(-(len(text) + 8) // _DATA_ALIGNMENT) * _DATA_ALIGNMENT - 8
        self.header = struct.pack("<Q", padded) + text.ljust(padded)
        """The first bytes of the file."""
        self.size = len(self.header) + offset
        """Size of the whole file."""
        self._starts = starts

    @property
    def filename(self) -> str:
        """The file's name on disk."""
        return f"{self.file}.safetensors"

    def start(self, name: str) -> int:
        """Where a tensor's bytes begin in the file."""
        return len(self.header) + self._starts[name]


@dataclass(frozen=True)
class Catalog:
    """All tensors of a checkpoint, each once."""

    entries: tuple[Entry, ...]

    def __post_init__(self) -> None:
        """Refuse a name that occurs twice in one file."""
        if len(self.by_key) != len(self.entries):
            raise CheckpointError("two tensors of one checkpoint file have the same name")

    @cached_property
    def by_key(self) -> dict[tuple[str, str], Entry]:
        """Entries by file and name."""
        return {entry.key: entry for entry in self.entries}

    @cached_property
    def layouts(self) -> dict[str, FileLayout]:
        """The layout of each file."""
        files = dict.fromkeys(entry.file for entry in self.entries)
        return {f: FileLayout(f, (e for e in self.entries if e.file == f)) for f in files}

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(entry.nbytes for entry in self.entries)

    def to_json(self) -> list[Any]:
        """Plain values for a record."""
        return [[e.file, e.name, e.dtype, list(e.shape), list(e.holders)] for e in self.entries]

    @cached_property
    def text(self) -> bytes:
        """``to_json`` as JSON: the same for every checkpoint of a run, and long to make."""
        return json.dumps(self.to_json(), separators=(",", ":")).encode()

    @cached_property
    def digest(self) -> str:
        """A digest of ``text``: always by one algorithm, so that any two can be compared."""
        return hashlib.blake2b(self.text, digest_size=16).hexdigest()

    @classmethod
    def from_json(cls, rows: Any) -> Catalog:
        """The reverse of ``to_json``; equal lists one after the other give one object.

        All records of a checkpoint hold the same list, and a restore reads each more than once.

        Raises:
            CheckpointError: this is not what ``to_json`` writes.
        """
        global _last
        known, catalog = _last
        if catalog is not None and cls is Catalog and rows == known:
            return catalog
        try:
            catalog = cls(tuple(_entry(*row) for row in rows))
        except (TypeError, ValueError, KeyError) as error:
            raise CheckpointError(f"the list of tensors is damaged: {error}") from error
        _last = (rows, catalog)  # one assignment: another thread sees both, or neither
        return catalog


_last: tuple[Any, Catalog | None] = (None, None)
"""The list that was read last, as JSON gave it, and what it became."""


def _entry(file: str, name: str, dtype: str, shape: list[int], holders: list[int]) -> Entry:
    if dtype not in DTYPE_BYTES or any(n < 0 for n in shape):
        raise ValueError(f"{name} has dtype {dtype!r} and shape {shape}")
    return Entry(
        file=str(file),
        name=str(name),
        dtype=dtype,
        shape=tuple(int(n) for n in shape),
        holders=tuple(int(n) for n in holders),
    )


def differences(saved: Catalog, wanted: Mapping[tuple[str, str], Entry]) -> list[str]:
    """Every name and shape in which a checkpoint and a run differ, one line each."""
    lines = []
    for key, entry in saved.by_key.items():
        here = wanted.get(key)
        if here is None:
            lines.append(f"{entry.file} {entry.name}: only in the checkpoint")
        elif (here.dtype, here.shape) != (entry.dtype, entry.shape):
            lines.append(
                f"{entry.file} {entry.name}: {entry.dtype} {list(entry.shape)} in the checkpoint, "
                f"{here.dtype} {list(here.shape)} here"
            )
    missing = [key for key in wanted if key not in saved.by_key]
    return lines + [f"{file} {name}: missing in the checkpoint" for file, name in missing]
