"""A copy of a database without holes: what each key needs lies together, in the order of keys."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sapwood.data.check import require_bool, require_callable, require_path
from sapwood.data.free import free_pages
from sapwood.data.index import Index, build_index, list_databases
from sapwood.data.pagefile import data_file, open_pages
from sapwood.data.source import Source
from sapwood.data.write.base import Phase, load_lmdb, silent
from sapwood.data.write.draft import cannot_write, drafted
from sapwood.errors import DataError

__all__ = ["Compacted", "compact"]

_BLOCK = 2**20
_COMPARED = 8 * 2**20
"""About so many bytes of both files are in memory while they are compared."""

_Advance = Callable[[int], None]
_Indexes = dict[bytes | None, Index]


@dataclass(frozen=True, kw_only=True)
class Compacted:
    """What a copy has saved."""

    file: Path
    before: int
    """Bytes of the file it was made from."""
    after: int
    records: int
    databases: int
    """How many there are, with the main one."""


def compact(
    source: str | os.PathLike[str],
    dest: str | os.PathLike[str],
    *,
    force: bool = False,
    compare: bool = True,
    phase: Phase = silent,
) -> Compacted:
    """Copy a database such that pages are in order and none are free.

    ``dest`` is there when all of it is, or not at all. The source is walked before it is copied, as
    liblmdb does not bear damage. Afterwards every database of the copy is walked, each page that a
    record needs is checked, and keys and values are compared with those of the source, byte for
    byte.

    Args:
        source: An LMDB file, or a folder with data.mdb in it.
        dest: The file to write.
        force: Replace a file that is there; it may be the source itself.
        compare: Compare bytes, and not only how many records there are, and how long.
        phase: Told what is being done, and how far it is.

    Raises:
        ConfigError: py-lmdb is missing, or ``dest`` exists.
        DataError: the source is damaged or was written to meanwhile, or ``dest`` cannot be written.
    """
    lmdb = load_lmdb("compact")
    origin, target = data_file(source), Path(require_path("dest", dest))
    require_bool("force", force)
    require_bool("compare", compare)
    require_callable("phase", phase)
    with drafted(target, force=force) as draft:
        ours = _indexes(origin, phase, "reading pages", thorough=False)
        with phase("copying", _used(origin)) as advance:
            _copy(lmdb, origin, draft, target, advance)
        _check_unchanged(ours[None])
        theirs = _indexes(draft, phase, "checking", thorough=True)
        _check_same(ours, theirs)
        if compare:
            _compare_all(ours, theirs, phase)
            _check_unchanged(ours[None])
        after = draft.stat().st_size
    return Compacted(
        file=target,
        before=ours[None].fingerprint.size,
        after=after,
        records=sum(map(len, ours.values())),
        databases=len(ours),
    )


def _indexes(path: Path, phase: Phase, what: str, *, thorough: bool) -> _Indexes:
    """Of all databases; None is the main one."""
    names = [None, *sorted(list_databases(path))]
    with phase(what, _used(path)) as advance:
        return {
            name: build_index(path, name, thorough=thorough, progress=advance) for name in names
        }


def _used(path: Path) -> int:
    """Bytes of pages that are not free."""
    with open_pages(path) as file:
        return (file.last_page + 1 - len(free_pages(file))) * file.page_size


def _check_unchanged(index: Index) -> None:
    with open_pages(index.file) as file:
        if file.fingerprint != index.fingerprint:
            raise DataError("the database was changed while it was copied; try again later")


def _copy(lmdb: Any, origin: Path, draft: Path, dest: Path, advance: _Advance) -> None:
    """Through a pipe: its other end is ours, so that the copy ends at once when we do."""
    with _sender(lmdb, origin) as (pipe, sent), draft.open("r+b", buffering=0) as out:
        while block := os.read(pipe, _BLOCK):
            try:
                _write(out.fileno(), block)
            except OSError as error:
                raise cannot_write(dest, error) from error
            advance(len(block))
        try:
            sent.result()
        except lmdb.Error as error:
            raise DataError(f"{origin}: py-lmdb cannot copy it: {error}") from error


@contextmanager
def _sender(lmdb: Any, origin: Path) -> Iterator[tuple[int, Future[None]]]:
    """A thread that writes the copy into a pipe; if we leave early, its next write fails."""
    receiving, sending = os.pipe()

    def send() -> None:
        try:
            with lmdb.open(str(origin), subdir=False, readonly=True, lock=False) as env:
                env.copyfd(sending, compact=True)
        finally:
            os.close(sending)

    with ThreadPoolExecutor(1, "sapwood-compact") as pool:
        sent = pool.submit(send)
        try:
            yield receiving, sent
        finally:
            os.close(receiving)


def _write(fd: int, block: bytes) -> None:
    rest = memoryview(block)
    while rest:
        rest = rest[os.write(fd, rest) :]


def _check_same(ours: _Indexes, theirs: _Indexes) -> None:
    origin, copy = ours[None].file, theirs[None].file
    if ours.keys() != theirs.keys():
        raise DataError(f"{copy}: the copy has other named databases than {origin}; try again")
    for name in ours:
        for one in ("flags", "lengths", "key_lengths"):
            if not np.array_equal(getattr(ours[name], one), getattr(theirs[name], one)):
                raise DataError(f"{copy}: the {one} of records are not those of {origin}")


def _compare_all(ours: _Indexes, theirs: _Indexes, phase: Phase) -> None:
    total = sum(int(i.lengths.sum()) + int(i.key_lengths.sum()) for i in ours.values())
    with (
        phase("comparing", total) as advance,
        closing(Source(ours[None])) as file,
        closing(Source(theirs[None])) as copy,
    ):
        for name in ours:
            _compare(file, copy, ours[name], theirs[name], advance)


def _compare(file: Source, copy: Source, ours: Index, theirs: Index, advance: _Advance) -> None:
    for first, last in _spans(ours.lengths.astype(np.int64) + ours.key_lengths):
        part = slice(first, last)
        mine, other = _contents(file, ours, part), _contents(copy, theirs, part)
        for number, (one, two) in enumerate(zip(mine, other, strict=True), first):
            if one != two:
                raise DataError(
                    f"{copy.path}: record {number} is not that of {file.path}; the disk or the "
                    "memory may be faulty: try again"
                )
            advance(len(one))


def _spans(sizes: NDArray[np.int64]) -> Iterator[tuple[int, int]]:
    """Records of about as many bytes each time."""
    ends = np.cumsum(sizes)
    first = 0
    while first < len(sizes):
        done = int(ends[first - 1]) if first else 0
        last = max(int(np.searchsorted(ends, done + _COMPARED, side="right")), first + 1)
        yield first, last
        first = last


def _contents(source: Source, index: Index, part: slice) -> Iterator[bytes]:
    """Key and value of each record, as one."""
    columns = (index.key_offsets, index.key_lengths, index.offsets, index.lengths)
    for key, key_size, value, size in zip(*(one[part].tolist() for one in columns), strict=True):
        data = memoryview(bytearray(key_size + size))
        source.read_into(source.fd, data[:key_size], key, key_size)
        source.read_into(source.fd, data[key_size:], value, size)
        yield bytes(data)
