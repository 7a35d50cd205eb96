"""The file operations keepers and tiers are made of, few enough to reason about a crash at each.

Every operation passes the fault point ``files`` first, so that a test can end the process before,
between and after any two of them, or make one fail as a full disk does.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from sapwood.regular import open_regular
from sapwood.runtime import faults
from sapwood.runtime.heartbeat import beat

__all__ = ["FileWriter", "Files", "HeldFolder", "draft_of", "lock_draft"]

WRITE_BYTES = 16 * 2**20
"""One system call writes at most this much: long enough to be fast, short enough to be polite."""
_PARTS = 1024
"""The most parts one system call gathers."""
DIRECT_BYTES = 512 * 1024
"""From this size on, data whose place in memory allows it goes past the page cache: that takes a
third of the CPU, and leaves the cache to the training's samples."""
PAGE = 4096


class FileWriter:
    """A file being written, at any offset."""

    def __init__(self, path: Path, fd: int, *, direct: bool = True) -> None:
        """Made by ``Files``; ``direct``: large data may go past the page cache."""
        self.path = path
        self._fd = fd
        self._goes_direct = direct  # until the file system refuses

    def resize(self, nbytes: int) -> None:
        """Set the size; what was not written reads as zeros."""
        faults.point("files", op="resize", path=self.path)
        os.ftruncate(self._fd, nbytes)

    def write_at(self, offset: int, data: Any) -> None:
        """Write all of ``data``."""
        memory = memoryview(data).cast("B")
        while memory:
            faults.point("files", op="write", path=self.path)
            written = self._write_some(memory, offset)
            beat()
            memory, offset = memory[written:], offset + written

    def _write_some(self, memory: memoryview, offset: int) -> int:
        lies_alike = (_address(memory) - offset) % PAGE == 0
        if not self._goes_direct or len(memory) < DIRECT_BYTES or not lies_alike:
            return os.pwrite(self._fd, memory[:WRITE_BYTES], offset)
        if offset % PAGE:
            return os.pwrite(self._fd, memory[: PAGE - offset % PAGE], offset)
        return self._write_pages(memory[: min(len(memory) // PAGE * PAGE, WRITE_BYTES)], offset)

    def _write_pages(self, memory: memoryview, offset: int) -> int:
        """Write whole pages past the page cache, where the file system can do that."""
        flags = fcntl.fcntl(self._fd, fcntl.F_GETFL)
        try:
            fcntl.fcntl(self._fd, fcntl.F_SETFL, flags | os.O_DIRECT)
            return os.pwrite(self._fd, memory, offset)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            self._goes_direct = False
        finally:
            fcntl.fcntl(self._fd, fcntl.F_SETFL, flags)
        return os.pwrite(self._fd, memory, offset)

    def write_parts(self, offset: int, parts: Sequence[memoryview]) -> None:
        """Write small parts one after the other, many in one system call."""
        for first in range(0, len(parts), _PARTS):
            batch = parts[first : first + _PARTS]
            faults.point("files", op="write", path=self.path)
            written, wanted = os.pwritev(self._fd, batch, offset), sum(map(len, batch))
            beat()
            if written < wanted:
                self.write_at(offset + written, b"".join(batch)[written:])
            offset += wanted

    @property
    def size(self) -> int:
        """The file's size now."""
        return os.fstat(self._fd).st_size

    def sync(self) -> None:
        """Return when the bytes are on the device."""
        faults.point("files", op="sync", path=self.path)
        os.fsync(self._fd)
        beat()

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


class HeldFolder:
    """A folder that files are being written to, to notice that another one has its name now.

    Whoever clears up may remove a folder that has no record yet, and another rank may make it anew:
    a record that came to lie there would be of bytes that went with the first.
    """

    def __init__(self, path: Path) -> None:
        """Open it, which keeps its number from being given to another."""
        self.path = path
        self._fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    def check(self) -> None:
        """See that it still has its name.

        Raises:
            FileNotFoundError: it has not.
        """
        if not os.path.samestat(os.fstat(self._fd), self.path.stat()):
            raise FileNotFoundError(
                errno.ENOENT,
                "it was removed while it was written to, and made anew",
                str(self.path),
            )

    def close(self) -> None:
        """Let go of it; calling it again does nothing."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> HeldFolder:
        """Close at the end of a ``with`` block."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close."""
        self.close()


class Files:
    """Operations that change a folder tree. They raise ``OSError``, as the system gives it."""

    def __init__(self) -> None:
        """Nothing is known of any folder yet."""
        self._safe: set[Path] = set()

    def make_folder(self, path: Path) -> None:
        """Make a folder, and those above it, such that they are still there after a crash.

        A folder that exists is synced as well: whoever made it may not have come to that yet.
        """
        above = path.parent
        if above != path and not (above in self._safe and above.is_dir()):
            self._make_safe(above)
        if not path.is_dir():
            self.new_folder(path)
        self.sync_folder(above)

    def _make_safe(self, path: Path) -> None:
        """Do it once for the folders above: they come before the first checkpoint and stay."""
        try:
            self.make_folder(path)
        except OSError as error:
            # A folder above that cannot be read or synced at all; then this one is not ours.
            if error.errno not in (errno.EACCES, errno.EPERM, errno.EINVAL) or not path.is_dir():
                raise
        self._safe.add(path)

    def new_folder(self, path: Path) -> None:
        """Make one folder; it is no error if it is there."""
        faults.point("files", op="make_folder", path=path)
        with suppress(FileExistsError):
            path.mkdir()

    def create(self, path: Path) -> FileWriter:
        """Make or empty a file that nobody reads yet."""
        faults.point("files", op="create", path=path)
        return FileWriter(path, open_regular(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC))

    def draft(self, path: Path, *, direct: bool) -> FileWriter:
        """Make a file that nobody reads yet, locked as long as this process has it open.

        Raises:
            FileExistsError: the name is taken, or was by the time it was locked.
        """
        faults.point("files", op="create", path=path)
        fd = open_regular(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        try:
            if lock_draft(fd) is False:
                raise FileExistsError(errno.EEXIST, "somebody cleared it away", str(path))
        except BaseException:
            os.close(fd)
            raise
        return FileWriter(path, fd, direct=direct)

    def share(self, path: Path) -> FileWriter:
        """Open a file for writing that others write to as well, making it if it is not there."""
        faults.point("files", op="share", path=path)
        return FileWriter(path, open_regular(path, os.O_RDWR | os.O_CREAT))

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
        """Remove a folder with all it holds; it is no error if others remove it as well."""
        faults.point("files", op="remove_tree", path=path)
        shutil.rmtree(path, onerror=_unless_gone)

    def write_whole(
        self,
        path: Path,
        content: bytes,
        *,
        writer: str | None = None,
        held: HeldFolder | None = None,
    ) -> None:
        """Write a small file such that it is there whole or not at all, also after a crash.

        ``writer`` sets those apart who may write the same file at once, by default by process
        number; whoever writes again under the same name clears up what a crash has left. With
        ``held``, it is there only if its folder is still that one.
        """
        draft = draft_of(path, writer if writer is not None else str(os.getpid()))
        try:
            with self.create(draft) as file:
                file.write_at(0, content)
                file.sync()
            if held is not None:
                # Not before the draft is there: from now on, what takes the folder takes it along.
                held.check()
            self.publish(draft, path)
        except OSError:
            with suppress(OSError):
                draft.unlink()
            raise
        self.sync_folder(path.parent)


def _address(memory: memoryview) -> int:
    address: int = np.frombuffer(memory, np.uint8).ctypes.data
    return address


def lock_draft(fd: int) -> bool | None:
    """Lock a draft; False if its writer has it locked, or somebody cleared it away.

    The kernel ends the lock with the process. None where files cannot be locked.
    """
    locked: bool | None = True
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL):
            raise
        locked = None
    return locked if os.fstat(fd).st_nlink else False


def draft_of(path: Path, writer: str) -> Path:
    """The name under which ``writer`` prepares a file."""
    return path.with_name(f".{path.name}.draft-{writer}")


_Error = tuple[type[BaseException], BaseException, TracebackType]


def _unless_gone(_: Callable[..., Any], __: str, error: _Error) -> None:
    if not isinstance(error[1], FileNotFoundError):
        raise error[1]
