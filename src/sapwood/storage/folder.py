"""Objects as files of a folder, safe at any moment: a process may be killed, power may be cut.

    models/
        packs/3f9a1c          the object packs/3f9a1c, and nothing but its bytes
        .drafts/8c1f…         what nobody sees yet; locked by its writer as long as that lives

A draft gets its key by a hard link, which fails if there is an object: so of any number of writers,
on whatever machines, one wins. What is to be SYNCED is on the device before it gets its key, and
the key is, with all folders above it, before ``publish`` returns.
"""

from __future__ import annotations

import errno
import os
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from sapwood.errors import AlreadyThere, CannotMap, NotFound, StorageError
from sapwood.regular import open_regular
from sapwood.storage.base import QUIET_SECONDS, Descriptor, Durability, Entry
from sapwood.storage.common import CommonKeeper, too_large
from sapwood.storage.files import Files, lock_draft
from sapwood.storage.filesystems import filesystem_of, kind_of
from sapwood.storage.folderdraft import DRAFTS, FolderDraft, prune
from sapwood.storage.keys import checked_key, is_key
from sapwood.storage.mapped import Mapped, map_file
from sapwood.storage.preads import read_pieces, read_side_by_side
from sapwood.storage.ranges import Pieces
from sapwood.storage.room import storage_error

__all__ = ["FolderKeeper"]

_ABSENT = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR)


class FolderKeeper(CommonKeeper):
    """A folder on a disk, in memory (tmpfs) or on a network file system.

    Fulfils ``Keeper``, ``Linkable``, ``Mappable`` and ``Shareable``; networks are not mapped.
    """

    def __init__(
        self, folder: Path, *, files: Files | None = None, filesystem: str | None = None
    ) -> None:
        """``folder`` is made when the first object comes; ``filesystem`` says what it is on."""
        super().__init__(f"folder {folder}")
        self.folder = folder.absolute()
        self.files = files or Files()
        self._filesystem = filesystem

    @property
    def filesystem(self) -> str:
        """The type of the file system, as the system names it."""
        if self._filesystem is None:
            above = (one for one in (self.folder, *self.folder.absolute().parents) if one.is_dir())
            with self._errors("look at", self.folder):
                self._filesystem = filesystem_of(next(above))
        return self._filesystem

    @property
    def on_network(self) -> bool:
        """Whether other machines may be at it, and single readers mostly wait."""
        return kind_of(self.filesystem) == "network"

    @property
    def durability(self) -> Durability:
        """SYNCED on a disk or a network; what is in a tmpfs is gone with the power."""
        memory = kind_of(self.filesystem) == "memory"
        return Durability.WRITTEN if memory else Durability.SYNCED

    # -- writing -----------------------------------------------------------------------------

    def _begin(
        self, key: str, nbytes: int | None, *, replace: bool, durability: Durability
    ) -> FolderDraft:
        if not replace and self.path(key).is_file():
            raise AlreadyThere(f"{self.path(key)} is there already")
        with self._errors("write to", self.folder):
            return FolderDraft(self, key, nbytes, replace=replace, durability=durability)

    def link(self, source: str, key: str, *, durability: Durability | None = None) -> None:
        """Give a file a second name."""
        old, new = self.path(checked_key(source)), self.path(checked_key(key))
        level = self.level(durability)
        self._check_open()
        try:
            with self._errors("link", new):
                if level >= Durability.SYNCED:  # it may have been put with less
                    self._sync(source)
                self.give_name(old, new, lambda: self.files.link(old, new))
                if level >= Durability.SYNCED:
                    self._sync(key)  # it may have been replaced in between
                    self.sync_above(new)
        except StorageError:
            prune(new.parent, self.folder)
            raise

    def give_name(self, source: Path, path: Path, name: Callable[[], None]) -> None:
        """Make the folders above a key, and ``name`` it in them; raises ``OSError``.

        Raises:
            AlreadyThere: somebody was first.
            NotFound: there is no ``source``.
        """
        for left in range(100, -1, -1):
            self._make_above(path)
            try:
                name()
            except FileNotFoundError:
                if not source.is_file():
                    raise NotFound(f"there is no {source}") from None
                # Whoever removed the last object of the folder has removed the folder, just now.
                if not left:
                    raise
            except FileExistsError:
                if path.is_dir():
                    raise
                raise AlreadyThere(f"{path} is there already") from None
            else:
                return

    def _make_above(self, path: Path) -> None:
        above = [one for one in path.parents if one == self.folder or self.folder in one.parents]
        for one in reversed(above):
            if not one.is_dir():
                with suppress(FileNotFoundError):  # see ``give_name``
                    self.files.new_folder(one)

    def sync_above(self, path: Path) -> None:
        """Return when a key is on the device, with all folders above it; raises ``OSError``."""
        for one in path.parents:
            if one == self.folder:
                break
            self.files.sync_folder(one)
        self.make_drafts()

    def make_drafts(self) -> None:
        """Make the folder of drafts and all above it, such that they are still there after a crash.

        That syncs ``self.folder``, and once what is above it.
        """
        self.files.make_folder(self.folder / DRAFTS)

    def sync(self, keys: Iterable[str]) -> None:
        """Sync files that may have been put with less, and their names; nothing on a tmpfs."""
        self._check_open()
        if self.durability < Durability.SYNCED:
            return
        paths = {key: self.path(checked_key(key)) for key in keys}
        for key, path in paths.items():
            with self._errors("sync", path):
                self._sync(key)
        for path in {path.parent: path for path in paths.values()}.values():
            with self._errors("sync", path):
                self.sync_above(path)

    def _sync(self, key: str) -> None:
        fd = self._opened(key)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    # -- reading -----------------------------------------------------------------------------

    def _size(self, key: str) -> int:
        fd = self._opened(key)
        try:
            return os.fstat(fd).st_size
        finally:
            os.close(fd)

    def _get(self, key: str, limit: int) -> bytes:
        with self._errors("read", self.path(key)):
            fd = self._opened(key)
            try:
                size = os.fstat(fd).st_size
                if size > limit:
                    raise too_large(str(self.path(key)), size, limit)
                memory = bytearray(size)
                read_pieces(fd, key, [(0, memoryview(memory))])
            finally:
                os.close(fd)
        return bytes(memory)

    def _read(self, wanted: Mapping[str, Pieces]) -> None:
        for key, pieces in wanted.items():
            with self._errors("read", self.path(key)):
                if self.on_network:
                    read_side_by_side(lambda key=key: self._opened(key), key, pieces)  # type: ignore[misc]
                    continue
                fd = self._opened(key)
                try:
                    read_pieces(fd, key, pieces)
                finally:
                    os.close(fd)

    def map(self, key: str, *, writable: bool = False) -> Mapped:
        """Map the file; not over a network, where each page touched would be a request."""
        found = self.descriptor(key)
        try:
            with self._errors("map", self.path(key)):
                return map_file(found.fd, found.nbytes, writable=writable)
        finally:
            os.close(found.fd)

    def descriptor(self, key: str) -> Descriptor:
        """Open the file, to be read only."""
        checked_key(key)
        self._check_open()
        if self.on_network:
            raise CannotMap(
                f"{self.path(key)} is on a network file system ({self.filesystem}), where each "
                "page that is touched would be a request; read it instead"
            )
        fd = self._opened(key)
        return Descriptor(fd, 0, os.fstat(fd).st_size)

    def _opened(self, key: str) -> int:
        path = self.path(key)
        try:
            return open_regular(path)
        except OSError as error:
            if error.errno in _ABSENT or path.is_dir():
                raise NotFound(f"there is no {path}") from None
            raise storage_error(f"cannot read {path}", error) from error

    # -- listing and removing ----------------------------------------------------------------

    def _list(self, folder: str) -> Iterable[Entry]:
        start = self.path(folder) if folder else self.folder
        with self._errors("list", start):
            return list(_entries(start, f"{folder}/" if folder else ""))

    def _remove(self, keys: Sequence[str], durability: Durability) -> None:
        paths = [self.path(key) for key in keys]
        with self._errors("remove from", self.folder):
            for path in paths:
                if not path.is_dir():
                    with suppress(NotADirectoryError):
                        self.files.remove(path)
            above = dict.fromkeys(path.parent for path in paths)
            if durability >= Durability.SYNCED:
                for one in above:
                    with suppress(FileNotFoundError, NotADirectoryError):
                        self.files.sync_folder(one)
        for one in above:
            prune(one, self.folder)

    def sweep(self, quiet: float = QUIET_SECONDS) -> int:
        """Remove drafts that nobody has locked; over a network, those that are quiet as well."""
        self._check_open()
        drafts = self.folder / DRAFTS
        count = 0
        with self._errors("clear up", drafts):
            now = self._now() if self.on_network and drafts.is_dir() else None
            for name in _names(drafts):
                if self._sweep_one(drafts / name, quiet, now):
                    count += 1
        return count

    def _sweep_one(self, path: Path, quiet: float, now: float | None) -> bool:
        try:
            fd = open_regular(path)
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.EACCES, errno.EINVAL, errno.EISDIR):
                return False  # gone, another user's, or no draft at all
            raise
        try:
            locked = lock_draft(fd)
            # Over a network, a lock may be seen by those of one machine only.
            seen = locked and now is None
            age = (time.time() if now is None else now) - os.fstat(fd).st_mtime
            if locked is False or (not seen and age < quiet):
                return False
            self.files.remove(path)
        finally:
            os.close(fd)
        return True

    def _now(self) -> float:
        """The time by the clock of a file server, which is not ours."""
        path = self.folder / DRAFTS / f"clock-{secrets.token_hex(8)}"
        with self.files.draft(path, direct=False) as file:
            try:
                file.write_at(0, b"?")
                file.sync()
                return path.stat().st_mtime
            except FileNotFoundError:  # somebody else clears up
                return time.time()
            finally:
                self.files.remove(path)

    # -- places and errors -------------------------------------------------------------------

    def path(self, key: str) -> Path:
        """The file of an object."""
        return self.folder / key

    @contextmanager
    def _errors(self, doing: str, place: Path) -> Iterator[None]:
        try:
            yield
        except StorageError:
            raise
        except OSError as error:
            raise self.failure(doing, place, error) from error

    def failure(self, doing: str, place: Path, error: OSError) -> StorageError:
        """What the system gave, and what to do about it."""
        if error.errno in (errno.ENOTDIR, errno.EISDIR, errno.EEXIST):
            return StorageError(
                f"cannot {doing} {place}: a key cannot be an object and the folder of others at "
                f"the same time ({error.strerror})"
            )
        named = doing in ("publish", "link")
        if named and error.errno in (errno.EPERM, errno.EOPNOTSUPP, errno.EMLINK, errno.EXDEV):
            return StorageError(
                f"cannot {doing} {place}: {error.strerror}; objects get their keys by hard links, "
                f"which {self.filesystem} must allow in all of {self.folder}"
            )
        return storage_error(f"cannot {doing} {place}", error)


def _entries(folder: Path, prefix: str) -> Iterator[Entry]:
    try:
        with os.scandir(folder) as found:
            for entry in found:
                key = prefix + entry.name
                if not is_key(key):
                    continue
                with suppress(FileNotFoundError):
                    if entry.is_dir():
                        yield from _entries(folder / entry.name, f"{key}/")
                    elif entry.is_file():
                        status = entry.stat()
                        yield Entry(key, status.st_size, status.st_mtime)
    except (FileNotFoundError, NotADirectoryError):
        return


def _names(folder: Path) -> list[str]:
    try:
        return sorted(entry.name for entry in folder.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []
