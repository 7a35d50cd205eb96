"""Find every record of a database by reading its branch and leaf pages, and no others.

The walk goes down level by level, all pages of a level at once. Pages are counted before they are
read, so damaged pages that lead in circles end in an error, not in a walk without end.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from sapwood.data.layout import BRANCH, EMPTY, HEADER, MAX_DEPTH, Database, read_database
from sapwood.data.leaves import Found, Trees, scan_leaves, scan_values
from sapwood.data.pagefile import PageFile
from sapwood.errors import DataError

__all__ = ["Walk"]

Ints = NDArray[np.int64]
_TREE = np.dtype(
    [
        ("pad", "<u4"),
        ("flags", "<u2"),
        ("depth", "<u2"),
        ("branches", "<u8"),
        ("leaves", "<u8"),
        ("overflows", "<u8"),
        ("entries", "<u8"),
        ("root", "<u8"),
    ]
)


class Walk:
    """One walk over one database of a file."""

    def __init__(self, file: PageFile) -> None:
        """Nothing is read yet."""
        self._file = file
        self._claimed: list[Ints] = []
        self._count = 0
        self._used = np.empty(0, np.int64), np.empty(0, np.int64)

    def records(
        self, database: Database, *, names: bool = False
    ) -> tuple[Found, dict[bytes, Database]]:
        """Every record in the order of keys, and the databases named in it.

        Raises:
            DataError: a page is not what it should be.
        """
        self._check(database)
        if database.root == EMPTY:
            return Found.joined([]), {}
        root = np.array([database.root], np.int64)
        leaves, _ = self._descend(root, np.array([database.depth], np.int64))
        if not database.dupsort:  # where releases differ in whether trees of values count
            self._compare("branch", database.branches, self._count - len(leaves))
            self._compare("leaf", database.leaves, len(leaves))
        parts, trees = self._scan(leaves, database, names=names)
        named = {}
        for some in trees:
            if database.dupsort:
                parts += self._expand(some)
            else:
                named.update(self._names(some))
        found = Found.joined(parts)
        self._check_found(database, found, len(named))
        return found, named

    def _check(self, database: Database) -> None:
        empty = database.root == EMPTY
        if empty != (database.entries == 0) or empty != (database.depth == 0):
            raise DataError(
                f"page {database.root}: expected a root, a depth and records, or none of them; "
                f"found depth {database.depth} and {database.entries} records"
            )
        if database.depth > MAX_DEPTH:
            raise DataError(
                f"page {database.root}: expected a tree of at most {MAX_DEPTH} levels, found "
                f"{database.depth}"
            )
        if not empty and database.root > self._file.last_page:
            raise DataError(
                f"page {database.root}: expected a root among the pages up to "
                f"{self._file.last_page}"
            )

    def _claim(self, numbers: Ints) -> None:
        """Note that these pages are about to be read as part of the tree."""
        self._file.require_pages(numbers)
        self._count += len(numbers)
        if self._count > self._file.last_page:
            raise DataError(
                f"page {int(numbers[0])}: expected at most {self._file.last_page} pages in a tree; "
                "pages lead in a circle"
            )
        self._claimed.append(numbers)

    def _descend(self, roots: Ints, depths: Ints) -> tuple[Ints, Ints]:
        """The leaves under each root, in the order of keys, and which root each is of."""
        leaves, owners = [], []
        for depth in np.unique(depths):
            owner = np.flatnonzero(depths == depth)
            numbers = roots[owner]
            self._claim(numbers)
            for _ in range(int(depth) - 1):
                numbers, row = self._children(numbers)
                owner = owner[row]
                self._claim(numbers)
            leaves.append(numbers)
            owners.append(owner)
        return np.concatenate(leaves), np.concatenate(owners)

    def _children(self, numbers: Ints) -> tuple[Ints, Ints]:
        children, rows = [], []
        for places, pages in self._file.batches(numbers):
            headers = pages.tree_headers(BRANCH)
            nodes = pages.nodes(headers)
            pages.require_dense(headers, nodes, 0)
            children.append(nodes.child)
            rows.append(places[nodes.row])
        child, row = np.concatenate(children), np.concatenate(rows)
        order = np.argsort(row, kind="stable")
        return child[order], row[order]

    def _scan(
        self, leaves: Ints, database: Database, *, names: bool
    ) -> tuple[list[Found], list[Trees]]:
        parts: list[Found] = []
        trees: list[Trees] = []
        size = self._file.page_size
        for places, pages in self._file.batches(leaves):
            some, deeper = scan_leaves(pages, places, size, dupsort=database.dupsort, names=names)
            parts += some
            if len(deeper.slot):
                trees.append(deeper)
        return parts, trees

    def _expand(self, trees: Trees) -> list[Found]:
        """The values of keys that have a tree of values each."""
        facts = np.ascontiguousarray(trees.raw).view(_TREE)[:, 0]
        ok = (facts["depth"] > 0) & (facts["depth"] <= MAX_DEPTH) & (facts["entries"] > 0)
        ok &= facts["root"] <= self._file.last_page
        if not ok.all():
            raise DataError(
                f"page {int(trees.page[np.argmin(ok)])}: expected the tree of a key's values to "
                f"have 1 to {MAX_DEPTH} levels, values, and a root up to {self._file.last_page}"
            )
        leaves, owner = self._descend(
            facts["root"].astype(np.int64), facts["depth"].astype(np.int64)
        )
        columns: list[tuple[Ints, ...]] = []
        for places, pages in self._file.batches(leaves):
            row, at, size = scan_values(pages, self._file.page_size)
            columns.append((places[row], at, size))
        place, offset, size = (np.concatenate(column) for column in zip(*columns, strict=True))
        order = np.argsort(place, kind="stable")
        place, offset, size = place[order], offset[order], size[order]
        mine = owner[place]
        counts = np.bincount(mine, minlength=len(facts)).astype(np.uint64)
        if (counts != facts["entries"]).any():
            first = int(np.argmax(counts != facts["entries"]))
            raise DataError(
                f"page {int(trees.page[first])}: expected {facts['entries'][first]} values of a "
                f"key, found {counts[first]}"
            )
        return [
            Found(
                slot=trees.slot[mine],
                key=trees.key[mine],
                key_size=trees.key_size[mine],
                offset=offset,
                size=size,
                big=np.zeros(len(mine), np.bool_),
            )
        ]

    def _names(self, trees: Trees) -> dict[bytes, Database]:
        named = {}
        for at, nbytes, raw in zip(trees.key, trees.key_size, trees.raw, strict=True):
            named[self._file.read(int(at), int(nbytes))] = read_database(raw.tobytes())
        return named

    def _compare(self, what: str, said: int, found: int) -> None:
        if said != found:
            raise DataError(f"expected {said} {what} pages, found {found}; a page is damaged")

    def _check_found(self, database: Database, found: Found, names: int) -> None:
        """No two things may share a page, and counts must be right."""
        start, count = self._big_pages(found)
        self._file.require_pages(start, count)
        self._require_apart(start, count)
        if database.entries != len(found.slot) + names:
            raise DataError(
                f"page {database.root}: expected {database.entries} records under it, found "
                f"{len(found.slot) + names}"
            )
        if int(count.sum()) > database.overflows:
            raise DataError(
                f"page {database.root}: expected at most {database.overflows} overflow pages, "
                f"found {int(count.sum())}"
            )

    def _require_apart(self, start: Ints, count: Ints) -> None:
        starts = np.concatenate([*self._claimed, start])
        ends = starts + 1
        ends[len(starts) - len(start) :] = start + count
        order = np.argsort(starts, kind="stable")
        starts, ends = starts[order], ends[order]
        shared = np.flatnonzero(ends[:-1] > starts[1:])
        if len(shared):
            page = int(starts[shared[0] + 1])
            raise DataError(f"page {page}: expected it to be used once, and it is used twice")
        self._used = starts, ends

    def require_not_free(self, free: Ints) -> None:
        """Raise if a page of the records that were found is on the (ordered) list of free ones.

        Raises:
            DataError: there is one.
        """
        starts, ends = self._used
        wrong = np.flatnonzero(np.searchsorted(free, starts) != np.searchsorted(free, ends))
        if len(wrong):
            page = int(starts[wrong[0]])
            raise DataError(
                f"page {page}: expected it, which is in use, not to be on the list of free pages"
            )

    def _big_pages(self, found: Found) -> tuple[Ints, Ints]:
        size = self._file.page_size
        start = (found.offset[found.big] - HEADER) // size
        return start, (HEADER - 1 + found.size[found.big]) // size + 1
