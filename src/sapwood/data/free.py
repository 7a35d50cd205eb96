"""Which pages of a file are free: no record may lead to one of them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from sapwood.data.pagefile import PageFile
from sapwood.data.walk import Walk
from sapwood.errors import DataError

__all__ = ["free_pages"]

_NUMBER = 8


def free_pages(file: PageFile) -> NDArray[np.int64]:
    """The numbers of free pages, in order.

    Raises:
        DataError: the list is damaged.
    """
    found, _ = Walk(file).records(file.meta.free)
    parts = [np.empty(0, np.uint64)]
    for offset, size in zip(found.offset.tolist(), found.size.tolist(), strict=True):
        # A list says how long it is, and may have room for more.
        numbers = np.frombuffer(file.read(offset, size // _NUMBER * _NUMBER), "<u8")
        if not len(numbers) or numbers[0] >= len(numbers):
            raise DataError(
                f"page {offset // file.page_size}: expected a list of free pages that fits in "
                f"{size} bytes; it is damaged"
            )
        parts.append(numbers[1 : 1 + int(numbers[0])])
    every = np.concatenate(parts)
    if len(every) and every.max() > file.meta.last_page:
        raise DataError(
            f"page {int(every.max())}: expected free pages up to {file.meta.last_page}; the list "
            "is damaged"
        )
    return np.sort(every.astype(np.int64))
