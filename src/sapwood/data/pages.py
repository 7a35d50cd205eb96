"""Many pages at once: their headers and nodes as arrays, with everything checked that can be.

LMDB has no checksums, but its pages are dense: the nodes of a page fill it from ``upper`` to its
end without a gap. So a flipped bit in a size or a pointer is noticed as a gap or an overlap.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from sapwood.data.layout import HEADER
from sapwood.errors import DataError

__all__ = ["Headers", "Nodes", "Pages", "gather"]

Ints = NDArray[np.int64]
NODE = 8


def gather(flat: NDArray[np.uint8], at: Ints, nbytes: int, dtype: str) -> NDArray[np.generic]:
    """``nbytes`` from each place, as numbers of ``dtype``: one row for each place."""
    if not len(at):
        return np.empty((0, nbytes // np.dtype(dtype).itemsize), dtype)
    return sliding_window_view(flat, nbytes)[at].view(dtype)


@dataclass(frozen=True, kw_only=True)
class Headers:
    """One number for each page."""

    number: NDArray[np.uint64]
    pad: Ints
    flags: Ints
    lower: Ints
    upper: Ints

    @property
    def counts(self) -> Ints:
        """How many nodes or values each page has."""
        return (self.lower - HEADER) >> 1


@dataclass(frozen=True, kw_only=True)
class Nodes:
    """One number for each node, in the order of keys."""

    row: Ints
    """Which page it is of."""
    place: Ints
    """Which node of that page it is."""
    at: Ints
    """Where its header is in the memory of the pages."""
    size: Ints
    flags: Ints
    key_size: Ints

    @property
    def key(self) -> Ints:
        """Where the keys are in the memory of the pages."""
        return self.at + NODE

    @property
    def data(self) -> Ints:
        """Where what follows the keys is."""
        return self.at + NODE + self.key_size

    @property
    def child(self) -> Ints:
        """Of a branch: the page each node leads to."""
        return self.size | (self.flags << 32)


@dataclass(frozen=True, kw_only=True)
class Pages:
    """Pages, or the smaller pages inside of leaves, somewhere in ``flat``."""

    flat: NDArray[np.uint8]
    base: Ints
    width: Ints
    number: Ints
    """The number of each page, or of the page it is in."""

    def require(self, ok: NDArray[np.bool_], expected: str, rows: Ints | None = None) -> None:
        """Raise for the first page that is not ``ok``.

        Raises:
            DataError: there is one.
        """
        if not ok.all():
            first = int(np.argmin(ok))
            row = first if rows is None else int(rows[first])
            raise DataError(f"page {int(self.number[row])}: expected {expected}; it is damaged")

    def headers(self) -> Headers:
        """The headers, checked for what holds of every page with nodes."""
        self.require(self.width >= HEADER, "a page header of 16 bytes")
        raw = gather(self.flat, self.base, HEADER, "<u2").astype(np.int64)
        number = gather(self.flat, self.base, HEADER, "<u8")[:, 0].astype(np.uint64)
        _, _, _, _, pad, flags, lower, upper = raw.T
        self.require((lower > HEADER) & (lower % 2 == 0), "at least one node, and an even 'lower'")
        return Headers(number=number, pad=pad, flags=flags, lower=lower, upper=upper)

    def tree_headers(self, *flags: int) -> Headers:
        """The headers of whole pages, which must bear their own number and one of ``flags``."""
        headers = self.headers()
        self.require(headers.number == self.number.astype(np.uint64), "its own number at byte 0")
        kinds = " or ".join(f"0x{one:x}" for one in flags)
        self.require(np.isin(headers.flags, flags), f"page flags {kinds}")
        return headers

    def nodes(self, headers: Headers) -> Nodes:
        """All nodes; their headers lie inside of their pages."""
        ok = (headers.lower <= headers.upper) & (headers.upper <= self.width)
        self.require(ok, "'lower' <= 'upper' <= its size")
        counts = headers.counts
        row = np.repeat(np.arange(len(counts), dtype=np.int64), counts)
        place = np.arange(len(row), dtype=np.int64) - np.repeat(np.cumsum(counts) - counts, counts)
        pointers = self.base[row] + HEADER + 2 * place
        offset = gather(self.flat, pointers, 2, "<u2")[:, 0].astype(np.int64)
        inside = (offset >= headers.upper[row]) & (offset + NODE <= self.width[row])
        self.require(inside & (offset % 2 == 0), "node pointers from 'upper' to its end", row)
        at = self.base[row] + offset
        low, high, flags, key_size = gather(self.flat, at, NODE, "<u2").astype(np.int64).T
        return Nodes(
            row=row, place=place, at=at, size=low | high << 16, flags=flags, key_size=key_size
        )

    def require_dense(self, headers: Headers, nodes: Nodes, payload: Ints | int) -> None:
        """Raise unless nodes with so many bytes after their keys fill their pages exactly."""
        start = nodes.at
        end = start + ((NODE + nodes.key_size + payload + 1) & ~1)
        order = np.lexsort((start, nodes.row))
        row, start, end = nodes.row[order], start[order], end[order]
        expected = np.empty_like(start)
        expected[1:] = end[:-1]
        first = np.cumsum(headers.counts) - headers.counts
        expected[first] = self.base + headers.upper
        self.require(start == expected, "nodes that follow each other without a gap", row)
        last = np.cumsum(headers.counts) - 1
        self.require(end[last] == self.base + self.width, "nodes that end where the page ends")

    def values(self, headers: Headers) -> tuple[Ints, Ints, Ints]:
        """Of pages of values of one size: their row, where they are, and their size."""
        counts, size = headers.counts, headers.pad
        room = self.width - HEADER - counts * size
        ok = (size > 0) & (room >= 0) & (room == headers.upper - headers.lower)
        self.require(ok, "as much room for values as its header says")
        row = np.repeat(np.arange(len(counts), dtype=np.int64), counts)
        place = np.arange(len(row), dtype=np.int64) - np.repeat(np.cumsum(counts) - counts, counts)
        return row, self.base[row] + HEADER + place * size[row], size[row]
