"""What the leaves of a database hold: values, names of databases, and keys with several values."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sapwood.data.layout import BIG, DATABASE_BYTES, DUP, FIXED, HEADER, LEAF, SUB
from sapwood.data.pages import Nodes, Pages, gather

__all__ = ["Found", "Trees", "scan_leaves", "scan_values"]

Ints = NDArray[np.int64]
_SUBPAGE, _DIRTY = 0x40, 0x10
_PLACES = 2**16
"""More than the nodes a page can have."""


@dataclass(frozen=True, kw_only=True)
class Found:
    """Records; all offsets are of the file."""

    slot: Ints
    """Orders records as their keys are ordered; values of one key share a slot, in their order."""
    key: Ints
    key_size: Ints
    offset: Ints
    size: Ints
    big: NDArray[np.bool_]
    """Whether the value has pages of its own."""

    def take(self, chosen: Ints) -> Found:
        """Some of them, in this order."""
        return Found(**{name: getattr(self, name)[chosen] for name in self.__dataclass_fields__})

    @classmethod
    def joined(cls, parts: list[Found]) -> Found:
        """All of ``parts``, in the order of slots."""
        if not parts:
            none = np.empty(0, np.int64)
            return cls(slot=none, key=none, key_size=none, offset=none, size=none, big=none > 0)
        names = cls.__dataclass_fields__
        whole = cls(**{name: np.concatenate([getattr(p, name) for p in parts]) for name in names})
        if (whole.slot[1:] >= whole.slot[:-1]).all():
            return whole
        return whole.take(np.argsort(whole.slot, kind="stable"))


@dataclass(frozen=True, kw_only=True)
class Trees:
    """Nodes that describe a tree: a named database, or the many values of one key."""

    slot: Ints
    key: Ints
    key_size: Ints
    page: Ints
    raw: NDArray[np.uint8]
    """48 bytes for each."""


def scan_leaves(
    pages: Pages, rank: Ints, page_size: int, *, dupsort: bool, names: bool
) -> tuple[list[Found], Trees]:
    """The records of leaf pages, and the trees they lead to; ``rank`` orders the pages."""
    headers = pages.tree_headers(LEAF)
    nodes = pages.nodes(headers)
    allowed = [0, DUP, DUP | SUB] if dupsort else [0, BIG]
    allowed += [SUB] if names and not dupsort else []
    wanted = f"node flags of {allowed}"
    pages.require(np.isin(nodes.flags, allowed), wanted, nodes.row)
    big = (nodes.flags & BIG) != 0
    pages.require_dense(headers, nodes, np.where(big, 8, nodes.size))
    shift = pages.number * page_size - pages.base
    move = shift[nodes.row]
    slot = rank[nodes.row] * _PLACES + nodes.place
    offset = nodes.data + move
    if big.any():
        number = gather(pages.flat, nodes.data[big], 8, "<u8")[:, 0].astype(np.uint64)
        # Far beyond any file, and no product of it overflows.
        number = np.minimum(number, 2**47).astype(np.int64)
        offset[big] = number * page_size + HEADER
    found = Found(
        slot=slot,
        key=nodes.key + move,
        key_size=nodes.key_size,
        offset=offset,
        size=nodes.size,
        big=big,
    )
    plain = np.flatnonzero((nodes.flags & (SUB | DUP)) == 0)
    parts = [found if len(plain) == len(slot) else found.take(plain)]
    subpages = np.flatnonzero(nodes.flags == DUP)
    if len(subpages):
        parts.append(_scan_subpages(pages, nodes, found, subpages))
    return parts, _trees(pages, nodes, found)


def _scan_subpages(pages: Pages, nodes: Nodes, found: Found, chosen: Ints) -> Found:
    """The values of keys that have few enough to lie in the leaf itself."""
    inner = Pages(
        flat=pages.flat,
        base=nodes.data[chosen],
        width=nodes.size[chosen],
        number=pages.number[nodes.row[chosen]],
    )
    row, at, size = _values_of(inner, LEAF | _SUBPAGE, LEAF | _SUBPAGE | FIXED, own_number=False)
    owner = chosen[row]
    # A page inside a leaf moves with it: what takes the leaf to its place takes the values there.
    move = found.key[owner] - nodes.key[owner]
    return Found(
        slot=found.slot[owner],
        key=found.key[owner],
        key_size=found.key_size[owner],
        offset=at + move,
        size=size,
        big=np.zeros(len(at), np.bool_),
    )


def scan_values(pages: Pages, page_size: int) -> tuple[Ints, Ints, Ints]:
    """Of leaves whose keys are the values of one key: row, file offset and size of each."""
    row, at, size = _values_of(pages, LEAF, LEAF | FIXED, own_number=True)
    return row, at + (pages.number * page_size - pages.base)[row], size


def _values_of(
    pages: Pages, loose: int, fixed: int, *, own_number: bool
) -> tuple[Ints, Ints, Ints]:
    """Values that are keys of pages with nodes, or of pages of one size, in order of the pages."""
    headers = pages.tree_headers(loose, fixed) if own_number else pages.headers()
    # LMDB leaves this flag on in the pages inside of leaves.
    flags = headers.flags if own_number else headers.flags & ~_DIRTY
    pages.require(np.isin(flags, [loose, fixed]), f"flags 0x{loose:x} or 0x{fixed:x} in it")
    parts = []
    for kind in (loose, fixed):
        chosen = np.flatnonzero(flags == kind)
        if not len(chosen):
            continue
        some = Pages(
            flat=pages.flat,
            base=pages.base[chosen],
            width=pages.width[chosen],
            number=pages.number[chosen],
        )
        head = some.headers()
        if kind == fixed:
            row, at, size = some.values(head)
        else:
            nodes = some.nodes(head)
            some.require((nodes.flags == 0) & (nodes.size == 0), "values without data", nodes.row)
            some.require_dense(head, nodes, 0)
            row, at, size = nodes.row, nodes.key, nodes.key_size
        parts.append((chosen[row], at, size))
    row, at, size = (np.concatenate(column) for column in zip(*parts, strict=True))
    order = np.argsort(row, kind="stable")
    return row[order], at[order], size[order]


def _trees(pages: Pages, nodes: Nodes, found: Found) -> Trees:
    chosen = np.flatnonzero((nodes.flags & SUB) != 0)
    right = nodes.size[chosen] == DATABASE_BYTES
    pages.require(right, "48 bytes that describe a database", nodes.row[chosen])
    return Trees(
        slot=found.slot[chosen],
        key=found.key[chosen],
        key_size=found.key_size[chosen],
        page=pages.number[nodes.row[chosen]],
        raw=gather(pages.flat, nodes.data[chosen], DATABASE_BYTES, "u1").astype(np.uint8),
    )
