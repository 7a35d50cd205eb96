"""What is saved beside tensors, as a little JSON and a region of raw bytes, and back.

The JSON goes into a shard's record, which everybody who looks at a checkpoint reads, and through
messages of limited size: so it stays small. What is large lies in the region, which is stored,
checksummed and sent as tensors are. Here is what needs no torch: ``state.copier`` makes the JSON,
``state.plain`` reads it.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from sapwood.errors import CheckpointError

__all__ = ["EXTRA_STATE", "MARK", "Blob", "Packed", "pack", "unpack"]

MARK = "$"
"""Marks what JSON cannot say: ``{"$": kind, "v": value}``."""
EXTRA_STATE = "extra state"
"""The name of what modules keep beside tensors, among what belongs to a run."""
INLINE, INLINE_IN_ALL = 8 * 1024, 64 * 1024
"""Blobs up to this size are kept in the JSON, up to so much in all: most runs need no region."""
LONG_TEXT = 16 * 1024
"""JSON of one entry that is longer goes into the region."""
_ALIGNMENT = 64
_TEXT = "text"
_SECTIONS = frozenset({"groups", "optimizer", "shared", "own", "random"})
"""What may refer to the region; the rest of the extras is JSON as it is."""
_ATOMS = frozenset({str, bool, int, float, type(None)})


@dataclass(frozen=True, slots=True)
class Blob:
    """Raw bytes a plain value refers to."""

    holder: dict[str, Any]
    """The part of the plain value that must say where the bytes are."""
    data: memoryview

    def inline(self) -> None:
        """Keep the bytes in the value itself."""
        self.holder["bytes"] = base64.b64encode(self.data).decode()


@dataclass(frozen=True)
class Packed:
    """Extras, ready to be stored."""

    extras: dict[str, Any] = field(default_factory=dict)
    """JSON; where it says ``at`` and ``nbytes``, the bytes are in the region."""
    parts: tuple[tuple[int, memoryview], ...] = ()
    """What the region consists of, by offset; what is between is not looked at."""
    nbytes: int = 0
    """Size of the region."""

    def write(self, write_at: Callable[[int, memoryview], None], begin: int = 0) -> None:
        """Write the region to where it begins."""
        for at, data in self.parts:
            write_at(begin + at, data)


class _Region:
    """Gives every blob its place."""

    def __init__(self) -> None:
        self.parts: list[tuple[int, memoryview]] = []
        self.nbytes = 0
        self._inline = 0

    def settle(self, blob: Blob) -> None:
        size = blob.data.nbytes
        if size <= INLINE and self._inline + size <= INLINE_IN_ALL:
            self._inline += size
            blob.inline()
        else:
            blob.holder.update(self._place(blob.data))

    def shorten(self, tree: Any) -> Any:
        text = json.dumps(tree, separators=(",", ":")).encode()
        if len(text) <= LONG_TEXT:
            return tree
        return {MARK: _TEXT, "v": self._place(memoryview(text))}

    def _place(self, data: memoryview) -> dict[str, int]:
        at = -(-self.nbytes // _ALIGNMENT) * _ALIGNMENT
        self.parts.append((at, data))
        self.nbytes = at + data.nbytes
        return {"at": at, "nbytes": data.nbytes}


def pack(entries: Mapping[tuple[str, ...], Any], blobs: Iterable[Blob]) -> Packed:
    """Put copies and their bytes in order; an entry's path is a section, or one and a name in it.

    Names stay in the JSON, so that one can see what a checkpoint holds without reading the region.
    """
    region = _Region()
    for blob in blobs:
        region.settle(blob)
    extras: dict[str, Any] = {}
    for (section, *names), entry in entries.items():
        short = region.shorten(entry)
        if names:
            extras.setdefault(section, {})[names[0]] = short
        else:
            extras[section] = short
    return Packed(extras, tuple(region.parts), region.nbytes)


def unpack(extras: Mapping[str, Any], region: Any = b"") -> dict[str, Any]:
    """The extras with all that lies in the region in its place, for ``from_plain``.

    Raises:
        CheckpointError: something is said to lie where the region is not.
    """
    memory = memoryview(region).cast("B") if len(region) else memoryview(b"")
    found = dict(extras)
    for section in _SECTIONS & extras.keys():
        found[section] = _whole(extras[section], memory)
    return found


def _whole(value: Any, region: memoryview) -> Any:
    if isinstance(value, list):
        return value if set(map(type, value)) <= _ATOMS else [_whole(v, region) for v in value]
    if not isinstance(value, dict):
        return value
    if MARK not in value:
        return {key: _whole(v, region) for key, v in value.items()}
    held = value["v"]
    if not isinstance(held, dict) or MARK in held:
        return {**value, "v": _whole(held, region)}
    if "at" not in held:
        return {**value, "v": {key: _whole(v, region) for key, v in held.items()}}
    found = _slice(region, held["at"], held["nbytes"])
    if value[MARK] == _TEXT:
        return _whole(_parsed(found), region)
    rest = {key: v for key, v in held.items() if key not in ("at", "nbytes")}
    return {**value, "v": {**rest, "bytes": found}}


def _slice(region: memoryview, at: Any, nbytes: Any) -> memoryview:
    good = isinstance(at, int) and isinstance(nbytes, int) and min(at, nbytes) >= 0
    if not good or at + nbytes > len(region):
        raise CheckpointError(
            f"what is saved beside tensors refers to bytes {at} to {at} + {nbytes}, but has "
            f"{len(region)}: its record does not belong to it"
        )
    return region[at : at + nbytes]


def _parsed(text: memoryview) -> Any:
    try:
        return json.loads(bytes(text))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"what is saved beside tensors is no JSON: {error}") from error
