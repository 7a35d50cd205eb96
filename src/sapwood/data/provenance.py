"""Where records must be, computed from how the database was written.

LMDB's allocator is deterministic, so a few facts about a load say where each value lies. That holds
for databases written in one transaction, and for compacted copies, of values of one length that
have pages of their own. After the second transaction freed pages are used again, and an open
reader changes which: such databases are refused, by comparing with the index.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from sapwood.data.check import require_choice, require_int
from sapwood.data.index import Index
from sapwood.data.layout import HEADER
from sapwood.errors import ConfigError

__all__ = ["Provenance"]

Ints = NDArray[np.int64]
_NODE, _POINTER, _NUMBER = 8, 2, 8


@dataclass(frozen=True, kw_only=True)
class Provenance:
    """How a database was written."""

    written: Literal["load", "append", "compacted"]
    """In one transaction in the order of keys, the same with LMDB's append flag, or by
    ``mdb_copy -c`` of such a one."""
    count: int
    key_bytes: int
    """The length of every key."""
    value_bytes: int
    """The length of every value."""
    page_size: int = 4096
    source: Literal["load", "append"] = "load"
    """How the database was written that was compacted."""

    def __post_init__(self) -> None:
        """Refuse what no database is like.

        Raises:
            ConfigError: a number is too small or of a wrong type, or a word is not known.
        """
        require_choice("written", self.written, ("load", "append", "compacted"))
        require_choice("source", self.source, ("load", "append"))
        for name, least in (("count", 1), ("key_bytes", 1), ("value_bytes", 0), ("page_size", 1)):
            require_int(name, getattr(self, name), least=least)

    def offsets(self) -> Ints:
        """Where each value is, in the order of keys.

        Raises:
            ConfigError: values do not have pages of their own, so that this cannot be computed.
        """
        most = ((self.page_size - HEADER) // 2 & ~1) - _POINTER
        if _NODE + self.key_bytes + self.value_bytes <= most:
            raise ConfigError(
                f"value_bytes={self.value_bytes}: values up to "
                f"{most - _NODE - self.key_bytes} bytes lie in leaves between keys; their places "
                "follow from the index only: use policy='dio' or 'coal'"
            )
        before = self._compacted() if self.written == "compacted" else self._loaded()
        pages = (HEADER - 1 + self.value_bytes) // self.page_size + 1
        numbers = 2 + before + np.arange(self.count) * pages
        return numbers * self.page_size + HEADER

    def checked(self, index: Index) -> Ints:
        """The same, after comparing with the index.

        Raises:
            ConfigError: they differ, so the database was not written like that.
        """
        if len(index) != self.count or index.page_size != self.page_size:
            raise ConfigError(
                f"provenance: {self.count} records in pages of {self.page_size} bytes expected, "
                f"and {index.file} has {len(index)} in pages of {index.page_size}"
            )
        if (index.lengths != self.value_bytes).any() or (index.key_lengths != self.key_bytes).any():
            raise ConfigError(
                f"provenance: values of {self.value_bytes} bytes and keys of {self.key_bytes} "
                f"expected, and some in {index.file} are not; use policy='dio' or 'coal'"
            )
        found = self.offsets()
        wrong = np.flatnonzero(found != index.offsets)
        if len(wrong):
            first = int(wrong[0])
            raise ConfigError(
                f"provenance: record {first} should be at byte {int(found[first])} and is at "
                f"{int(index.offsets[first])} ({len(wrong)} of {self.count} differ): the database "
                "was written in several transactions, in another order, or while somebody read "
                "it; use policy='dio' or 'coal', which need no provenance"
            )
        return found

    def _capacity(self, leaf: bool) -> int:
        """How many nodes a full page has."""
        node = _NODE + self.key_bytes + (_NUMBER if leaf else 0)
        node += node % 2
        return (self.page_size - HEADER) // (node + _POINTER)

    def _splits(self) -> tuple[int, int]:
        """The first record that splits a leaf, and how many records later the next one does."""
        full = self._capacity(leaf=True)
        append = self.written == "append" or (
            self.written == "compacted" and self.source == "append"
        )
        return full, full if append else full - 1

    def _loaded(self) -> Ints:
        """How many pages that are not values' lie before each value."""
        first, step = self._splits()
        records = np.arange(self.count)
        splits = np.where(records >= first, (records - first) // step + 1, 0)
        before = np.ones(self.count, np.int64)
        while splits.any():
            # One more page for each split, and a root above when there are two.
            before += splits + (splits > 0)
            splits = self._above(splits)
        return before

    def _compacted(self) -> Ints:
        """Each leaf follows the values it leads to, and each branch its last leaf."""
        first, step = self._splits()
        total = np.array([max(0, -(-(self.count - first) // step))])
        page, width = np.arange(self.count), step
        before = np.zeros(self.count, np.int64)
        while total[0]:
            page = np.minimum(page // width, total[0])
            before += page
            total, width = self._above(total), self._capacity(leaf=False)
        return before

    def _above(self, splits: Ints) -> Ints:
        """How often pages of one level have been split, from how often those below it were."""
        return np.where(splits > 0, (splits - 1) // self._capacity(leaf=False), 0)
