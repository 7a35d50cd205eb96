"""A file that has its name only when it is whole."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from sapwood.errors import ConfigError, DataError
from sapwood.storage.files import Files, draft_of

__all__ = ["cannot_write", "drafted"]

_WRITER = "sapwood"
"""One name for all: whoever writes next clears up what a killed process has left."""
_LITTLE = 128 * 2**20


@contextmanager
def drafted(dest: Path, *, force: bool) -> Iterator[Path]:
    """A name to write to; at the end of the block the file gets its own, if nothing was raised.

    ``force``: a file that is there already is replaced, at the end.

    Raises:
        ConfigError: there is such a file already, or it cannot be one.
        DataError: somebody else is writing it, or it cannot be written.
    """
    _check(dest, force=force)
    draft, files = draft_of(dest, _WRITER), Files()
    try:
        fd = _own(dest, draft)
    except OSError as error:
        raise cannot_write(dest, error) from error
    try:
        yield draft
        try:
            os.fsync(fd)
            _publish(draft, dest, force=force)
            files.sync_folder(dest.parent)
        except OSError as error:
            raise cannot_write(dest, error) from error
    finally:
        with suppress(OSError):
            if os.path.samestat(os.fstat(fd), draft.lstat()):
                draft.unlink()
        os.close(fd)


def cannot_write(dest: Path, error: Exception) -> DataError:
    """The error to raise when the system refuses to write."""
    why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    with suppress(OSError):
        # LMDB says of a full disk that input or output went wrong.
        free = shutil.disk_usage(dest.parent).free
        if free < _LITTLE or getattr(error, "errno", None) == errno.ENOSPC:
            why += f"; {free // 2**20} MiB are free there: free some, or choose another place"
    return DataError(f"{dest}: cannot be written: {why}")


def _check(dest: Path, *, force: bool) -> None:
    if dest.is_dir():
        raise ConfigError(f"{dest} is a folder; expected a file, such as {dest / 'data.mdb'}")
    if not dest.parent.is_dir():
        raise ConfigError(f"{dest}: there is no folder {dest.parent}; make it first")
    if not force and os.path.lexists(dest):
        raise ConfigError(f"{dest} exists; use --force (force=True) to replace it")


def _own(dest: Path, draft: Path) -> int:
    """Make the draft, empty, and keep everybody else from it."""
    while True:
        fd = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Who had it before may have given it its own name, or removed it, meanwhile.
            if os.path.samestat(os.fstat(fd), draft.lstat()):
                os.ftruncate(fd, 0)
                return fd
        except FileNotFoundError:
            pass
        except BlockingIOError as error:
            os.close(fd)
            raise DataError(f"{dest} is being written by another process; wait for it") from error
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)


def _publish(draft: Path, dest: Path, *, force: bool) -> None:
    if force:
        draft.replace(dest)
        return
    try:
        os.link(draft, dest)  # unlike a rename, it fails if somebody made the file meanwhile
    except FileExistsError as error:
        raise ConfigError(f"{dest} was made by somebody else meanwhile; it is kept") from error
