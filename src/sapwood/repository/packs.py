"""Packs: the new tensors of one save, one after the other in one object.

Tensors begin at multiples of 64 bytes, as torch wants them, and large ones at a page, so that they
can be mapped by themselves and read past the page cache.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Sequence

__all__ = ["FOLDER", "lay_out", "new_key", "pieces"]

FOLDER = "packs"

_ALIGNMENT, _PAGE = 64, 4096
_LARGE = 2**20
_ZEROS = memoryview(bytes(_PAGE))


def new_key() -> str:
    """A name that nobody else takes; sorted by time, spread over folders."""
    name = f"{time.time_ns() // 1_000_000:012x}-{secrets.token_hex(6)}"
    return f"{FOLDER}/{name[-2:]}/{name}"


def lay_out(sizes: Sequence[int]) -> tuple[list[int], int]:
    """Where each blob begins, and the size of the whole pack."""
    starts, at = [], 0
    for size in sizes:
        step = _PAGE if size >= _LARGE else _ALIGNMENT
        at = -(-at // step) * step
        starts.append(at)
        at += size
    return starts, at


def pieces(starts: Sequence[int], blobs: Sequence[memoryview]) -> Iterator[memoryview]:
    """The bytes of a pack in order, with the zeros between."""
    at = 0
    for start, blob in zip(starts, blobs, strict=True):
        if start > at:
            yield _ZEROS[: start - at]
        yield blob
        at = start + len(blob)
