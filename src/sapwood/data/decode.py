"""Calling ``decode``: an exception in it says which record of which batch it was about."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

from sapwood.data.batch import Batch
from sapwood.errors import DataError

__all__ = ["decode_batch"]

_NAMED = 5


def decode_batch(decode: Callable[[Batch], Any], batch: Batch, where: str) -> Any:
    """What ``decode`` makes of a batch; ``where`` begins an error, and says which batch it is.

    Raises:
        DataError: it raised, which is the cause of this one.
    """
    try:
        return decode(batch)
    except Exception as error:
        about = _records(decode, batch, error)
        raise DataError(f"{where}{about}: decode raised {type(error).__name__}: {error}") from error


def _records(decode: Callable[[Batch], Any], batch: Batch, error: Exception) -> str:
    """The record, if it is one alone; else those of the batch."""
    row = None if isinstance(error, MemoryError) else _find(decode, batch, type(error))
    if row is not None:
        return _named(batch, row)
    some = ", ".join(str(one) for one in batch.index[:_NAMED].tolist())
    more = ", ..." if len(batch) > _NAMED else ""
    return f"{len(batch)} records ({some}{more}), none of which does it alone"


def _named(batch: Batch, row: int) -> str:
    key = ""
    with suppress(DataError):  # the database may have been changed meanwhile, and is not the point
        key = f" (key {batch.part(row, row + 1).keys[0]!r}, {int(batch.lengths[row])} bytes)"
    return f"record {int(batch.index[row])}{key}"


def _find(decode: Callable[[Batch], Any], batch: Batch, kind: type[Exception]) -> int | None:
    """The first record that raises the same by itself, found by halving the batch."""

    def fails(low: int, high: int) -> bool:
        try:
            decode(batch.part(low, high))
        except kind:
            return True
        except Exception:
            return False  # a decode that expects whole batches says something else
        return False

    low, high = 0, len(batch)
    while high - low > 1:
        middle = (low + high) // 2
        if fails(low, middle):
            high = middle
        elif fails(middle, high):
            low = middle
        else:
            return None
    if not len(batch):
        return None
    # If its neighbour raises as well it is not about the record, but about parts of batches.
    beside = low - 1 if low else low + 1
    return None if beside < len(batch) and fails(beside, beside + 1) else low
