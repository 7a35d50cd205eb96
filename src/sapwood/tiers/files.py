"""The file operations tiers are made of, few enough to reason about a crash at each of them.

Every operation passes the fault point ``files`` first, so that a test can end the process before,
between and after any two of them, or make one fail as a full disk does.
"""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

from sapwood.runtime import faults

__all__ = ["FileWriter", "Files"]

WRITE_BYTES = 16 * 2**20
"""One system call writes at most this much: long enough to be fast, short enough to be polite."""


class FileWriter:
    """A file being written, at any offset."""

    def __init__(self, path: Path, fd: int) -> None:
        """Made by ``Files``."""
        self.path = path
        self._fd = fd

    def resize(self, nbytes: int) -> None:
        """Set the size; what was not written reads as zeros."""
        faults.point("files", op="resize", path=self.path)
        os.ftruncate(self._fd, nbytes)

    def write_at(self, offset: int, data: Any) -> None:
        """Write all of ``data``."""
        memory = memoryview(data).cast("B")
        while memory:
            faults.point("files", op="write", path=self.path)
            written = os.pwrite(self._fd, memory[:WRITE_BYTES], offset)
            memory, offset = memory[written:], offset + written

    def sync(self) -> None:
        """Return when the bytes are on the device."""
        faults.point("files", op="sync", path=self.path)
        os.fsync(self._fd)

    def close(self) -> None:
        """Close; calling it again does nothing."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> FileWriter:
        """Close at the end of a ``with`` block."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close."""
        self.close()


class Files:
    """Operations that change a folder tree. They raise ``OSError``, as the system gives it."""

    def make_folder(self, path: Path) -> None:
        """Make a folder, and those above it, such that they are still there after a crash."""
        if path.is_dir():
            return
        if path.parent != path:
            self.make_folder(path.parent)
        faults.point("files", op="make_folder", path=path)
        with suppress(FileExistsError):
            path.mkdir()
        self.sync_folder(path.parent)

    def create(self, path: Path) -> FileWriter:
        """Make or empty a file that nobody reads yet."""
        faults.point("files", op="create", path=path)
        flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
        return FileWriter(path, os.open(path, flags, 0o644))

    def share(self, path: Path) -> FileWriter:
        """Open a file for writing that others write to as well, making it if it is not there."""
        faults.point("files", op="share", path=path)
        return FileWriter(path, os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644))

    def publish(self, draft: Path, final: Path) -> None:
        """Give a complete and synced file or folder its final name."""
        faults.point("files", op="publish", path=final)
        draft.rename(final)

    def link(self, source: Path, target: Path) -> None:
        """Give a file a second name."""
        faults.point("files", op="link", path=target)
        target.hardlink_to(source)

    def sync_folder(self, path: Path) -> None:
        """Return when the names in a folder are on the device."""
        faults.point("files", op="sync_folder", path=path)
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def remove(self, path: Path) -> None:
        """Remove a file; it is no error if it is not there."""
        faults.point("files", op="remove", path=path)
        path.unlink(missing_ok=True)

    def remove_tree(self, path: Path) -> None:
        """Remove a folder with all it holds; it is no error if it is not there."""
        faults.point("files", op="remove_tree", path=path)
        with suppress(FileNotFoundError):
            shutil.rmtree(path)

    def write_whole(self, path: Path, content: bytes) -> None:
        """Write a small file such that it is there whole or not at all, also after a crash."""
        draft = path.with_name(f".{path.name}.draft-{os.getpid()}")
        try:
            with self.create(draft) as writer:
                writer.write_at(0, content)
                writer.sync()
            self.publish(draft, path)
        except OSError:
            with suppress(OSError):
                draft.unlink()
            raise
        self.sync_folder(path.parent)
