"""Records of any length out of a piece of memory, packed one after the other."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["copy_records", "gather_records"]

Ints = NDArray[np.int64]
Bytes = NDArray[np.uint8]

_SHORT = 96
"""Below this many bytes a record costs less as numbers in an array than as a turn of a loop."""


def gather_records(source: Bytes, offsets: Ints, lengths: Ints, width: int | None = None) -> Bytes:
    """The records at these offsets of ``source``, in that order, without gaps.

    ``width`` is their length if all are known to have the same.
    """
    if width is None and len(offsets) and (lengths == lengths[0]).all():
        width = int(lengths[0])
    if width is not None:
        return _rows(source, width)[offsets].reshape(-1)
    out = np.empty(int(lengths.sum()), np.uint8)
    copy_records(out, np.cumsum(lengths) - lengths, source, offsets, lengths)
    return out


def copy_records(out: Bytes, starts: Ints, source: Bytes, offsets: Ints, lengths: Ints) -> None:
    """Copy the records at these offsets of ``source`` to these places of ``out``."""
    if not len(offsets):
        return
    if (lengths == lengths[0]).all() and len(offsets) > 1:
        _equal_into(out, starts, source, offsets, int(lengths[0]))
    elif int(lengths.sum()) < _SHORT * len(lengths):
        inside = np.arange(int(lengths.sum())) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        out[inside + np.repeat(starts, lengths)] = source[inside + np.repeat(offsets, lengths)]
    else:
        to, of = memoryview(out), memoryview(source)  # type: ignore[arg-type]
        for start, offset, length in zip(
            starts.tolist(), offsets.tolist(), lengths.tolist(), strict=True
        ):
            to[start : start + length] = of[offset : offset + length]


def _rows(memory: Bytes, length: int) -> Bytes:
    """A row for every byte of the memory that ``length`` bytes follow."""
    # numpy's own as_strided takes longer than the copy of a small batch.
    return np.ndarray((len(memory) - length + 1, length), np.uint8, memory, 0, (1, 1))


def _equal_into(out: Bytes, starts: Ints, source: Bytes, offsets: Ints, length: int) -> None:
    _rows(out, length)[starts] = _rows(source, length)[offsets]
