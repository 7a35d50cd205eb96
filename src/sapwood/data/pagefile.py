"""An LMDB file, opened for reading pages; no lock is taken, so it is looked at again afterwards."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from sapwood.data.check import require_path
from sapwood.data.layout import META_BYTES, Meta, latest, page_size_of, read_meta
from sapwood.data.pages import Pages
from sapwood.errors import DataError

__all__ = ["Fingerprint", "PageFile", "data_file", "open_pages"]

FORMAT = 1
"""Of the fingerprint and the index file."""
BATCH_PAGES = 1024
_GAP = 8
"""So many pages between two wanted ones are read along: cheaper than one more request."""


@dataclass(frozen=True, kw_only=True)
class Fingerprint:
    """What tells one state of a database from another."""

    size: int
    mtime_ns: int
    txnid: int
    root: int
    page_size: int
    format: int = FORMAT


def data_file(path: str | os.PathLike[str]) -> Path:
    """The file that holds the pages: ``path`` itself, or ``data.mdb`` in that folder.

    Raises:
        ConfigError: it is no path.
    """
    found = Path(require_path("path", path))
    return found / "data.mdb" if found.is_dir() else found


class PageFile:
    """The pages of a file, as of the transaction that was the last when it was opened."""

    def __init__(self, path: Path, fd: int) -> None:
        """Made by ``open_pages``."""
        self.path, self.fd = path, fd
        self.progress: Callable[[int], None] = lambda nbytes: None
        """Called with the bytes of pages that were read."""
        self.fingerprint, self.meta = self._look()
        self.size, self.page_size = self.fingerprint.size, self.fingerprint.page_size
        # The pages up to the last used one need not all have been written.
        self.last_page = min(self.meta.last_page, self.size // self.page_size - 1)

    def _look(self) -> tuple[Fingerprint, Meta]:
        facts = os.fstat(self.fd)
        if not stat.S_ISREG(facts.st_mode):
            raise DataError("expected a file, or a folder with data.mdb in it")
        first = os.pread(self.fd, META_BYTES, 0)
        page_size = page_size_of(first)
        second = os.pread(self.fd, META_BYTES, page_size)
        metas = [read_meta(first, 0, page_size), read_meta(second, 1, page_size)]
        meta = latest(metas[0], metas[1])
        found = Fingerprint(
            size=facts.st_size,
            mtime_ns=facts.st_mtime_ns,
            txnid=meta.txnid,
            root=meta.main.root,
            page_size=page_size,
        )
        return found, meta

    def check_unchanged(self) -> None:
        """Raise if somebody wrote since the file was opened.

        Raises:
            DataError: it was changed, so what was read may be of two states.
        """
        now, _ = self._look()
        if now != self.fingerprint:
            raise DataError(
                f"the database was changed while it was read (transaction {self.meta.txnid}, now "
                f"{now.txnid}); try again when nobody writes to it"
            )

    def require_pages(self, first: NDArray[np.int64], count: NDArray[np.int64] | int = 1) -> None:
        """Raise unless these pages can be part of a tree.

        Raises:
            DataError: one lies outside of the file, or beyond its last used page.
        """
        limit = self.last_page + 1
        wrong = np.flatnonzero((first < 2) | (first > limit - count))
        if len(wrong):
            at = int(first[wrong[0]]) % 2**64
            end = at + int(np.broadcast_to(count, first.shape)[wrong[0]]) - 1
            raise DataError(
                f"page {at}: expected pages {at} to {end} to lie from 2 to {self.last_page}: the "
                f"last used page is {self.meta.last_page}, and the file has "
                f"{self.size // self.page_size} pages"
            )

    def batches(self, numbers: NDArray[np.int64]) -> Iterator[tuple[NDArray[np.int64], Pages]]:
        """Read pages in the order of the file; gives places in ``numbers``, and their pages."""
        order = np.argsort(numbers, kind="stable")
        for first in range(0, len(order), BATCH_PAGES):
            places = order[first : first + BATCH_PAGES]
            yield places, self._read(numbers[places])
            self.progress(len(places) * self.page_size)

    def _read(self, numbers: NDArray[np.int64]) -> Pages:
        size = self.page_size
        flat = np.empty(len(numbers) * size, np.uint8)
        rows = flat.reshape(-1, size)
        breaks = np.flatnonzero(np.diff(numbers) > _GAP) + 1
        starts, ends = [0, *breaks.tolist()], [*breaks.tolist(), len(numbers)]
        spans = [
            (int(numbers[a]), int(numbers[z - 1]) + 1) for a, z in zip(starts, ends, strict=True)
        ]
        for low, high in spans:  # all at once, so that the disk sees many requests
            os.posix_fadvise(self.fd, low * size, (high - low) * size, os.POSIX_FADV_WILLNEED)
        for a, z, (low, high) in zip(starts, ends, spans, strict=True):
            raw = self.read(low * size, (high - low) * size)
            rows[a:z] = np.frombuffer(raw, np.uint8).reshape(-1, size)[numbers[a:z] - low]
        base = np.arange(len(numbers), dtype=np.int64) * size
        return Pages(flat=flat, base=base, width=np.full_like(base, size), number=numbers)

    def read(self, offset: int, nbytes: int) -> bytes:
        """Read exactly these bytes.

        Raises:
            DataError: the file ends before.
        """
        parts, at = [], offset
        while at < offset + nbytes:
            part = os.pread(self.fd, offset + nbytes - at, at)
            if not part:
                raise DataError(
                    f"page {at // self.page_size}: the file ended at byte {at} while it was read"
                )
            parts.append(part)
            at += len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)


@contextmanager
def open_pages(path: str | os.PathLike[str]) -> Iterator[PageFile]:
    """Open a database; every error inside names the file.

    Raises:
        DataError: it cannot be read, or is not a database of the kind read here.
    """
    file = data_file(path)
    try:
        # NONBLOCK: opening a pipe must not wait for somebody to write to it.
        fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except (OSError, ValueError) as error:
        raise DataError(f"{file}: cannot be opened: {error}") from error
    try:
        pages = PageFile(file, fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
        yield pages
    except DataError as error:
        raise DataError(f"{file}: {error}") from error
    except OSError as error:
        raise DataError(f"{file}: cannot be read: {error}") from error
    finally:
        os.close(fd)
