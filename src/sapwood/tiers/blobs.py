"""Blobs in a folder of this node: what it keeps for itself and for others.

``<folder>/<area>/<group>/<name>.bin`` holds the bytes and ``<name>.json`` the record. Fulfils
``Keeper``, so that a tier need not care which of its keepers is the node it runs on.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sapwood.errors import CheckpointError, TierError
from sapwood.regular import open_regular, read_regular
from sapwood.storage.files import Files, FileWriter, HeldFolder
from sapwood.tiers.keeper import Blob, checked, is_name
from sapwood.tiers.leftovers import Stale, clear_folders, is_draft
from sapwood.tiers.record import CheckpointId
from sapwood.tiers.room import tier_error

__all__ = ["BlobFile", "BlobFolder"]

_SYNC_BYTES = 64 * 2**20
"""Sync this often, so that the last sync of a large blob is over before somebody gives up on it."""


class BlobFolder:
    """Blobs of all areas in one folder."""

    def __init__(self, folder: Path, *, files: Files | None = None) -> None:
        """``folder`` is made when the first blob comes."""
        self.folder = folder
        self._files = files or Files()

    def put(self, blob: Blob, nbytes: int) -> BlobFile:
        """Begin a file."""
        home = self._home(blob.area, blob.group)
        with _as_tier_error("write", home):
            self._files.make_folder(home)
            return BlobFile(home, checked(blob.name), nbytes, self._files)

    def names(self, area: str, group: str = "") -> Sequence[Blob]:
        """Every blob whose record is there."""
        root = self.folder / checked(area)
        with _as_tier_error("list", root):
            groups = [checked(group)] if group else _entries(root)
            return sorted(
                Blob(area, g, entry.removesuffix(".json"))
                for g in groups
                if is_name(g)
                for entry in _entries(root / g)
                if entry.endswith(".json") and is_name(entry.removesuffix(".json"))
            )

    def size(self, blob: Blob) -> int:
        """Size of the data file."""
        return self._stat(self.path(blob, "bin"))

    def record(self, blob: Blob) -> bytes:
        """Content of the record file."""
        path = self.path(blob, "json")
        try:
            return read_regular(path)
        except OSError as error:
            raise CheckpointError(f"cannot read {path}: {error.strerror or error}") from error

    def ask(self, blob: Blob, start: int, nbytes: int) -> _Part:
        """Remember what was asked for; it is read when it is waited for."""
        return _Part(self.path(blob, "bin"), start)

    def drop(self, area: str, group: str) -> None:
        """Take the records away first: a crash on the way leaves no blob that seems whole."""
        home = self._home(area, group)
        with _as_tier_error("remove", home):
            for blob in self.names(area, group):
                self._files.remove(home / f"{blob.name}.json")
            if home.is_dir():
                self._files.sync_folder(home)
            self._files.remove_tree(home)

    def clear(self, area: str, stale: Stale) -> list[CheckpointId]:
        """Remove drafts, and data whose record never came; see ``tiers.leftovers``."""
        root = self.folder / checked(area)
        with _as_tier_error("clear up", root):
            return clear_folders(self._files, root, stale, _unfinished)

    def close(self) -> None:
        """Nothing runs."""

    def path(self, blob: Blob, suffix: str) -> Path:
        """A blob's data (``bin``) or record (``json``)."""
        return self._home(blob.area, blob.group) / f"{checked(blob.name)}.{suffix}"

    def open_part(self, blob: Blob, suffix: str, start: int, nbytes: int | None) -> Opened:
        """A file of a blob and the part of it that was asked for; None means up to its end.

        Raises:
            CheckpointError: the blob is not there, or is shorter.
        """
        path = self.path(blob, suffix)
        size = self._stat(path)
        count = size - start if nbytes is None else nbytes
        if start < 0 or count < 0 or start + count > size:
            raise CheckpointError(f"{path} has {size} bytes, not {start}+{count}: it is truncated")
        try:
            return Opened(os.fdopen(open_regular(path), "rb", buffering=0), start, count)
        except OSError as error:
            raise CheckpointError(f"cannot read {path}: {error.strerror or error}") from error

    def _home(self, area: str, group: str) -> Path:
        return self.folder / checked(area) / checked(group)

    def _stat(self, path: Path) -> int:
        try:
            return path.stat().st_size
        except OSError as error:
            raise CheckpointError(f"cannot read {path}: {error.strerror or error}") from error


@dataclass(frozen=True)
class Opened:
    """A part of an open file."""

    file: Any
    start: int
    nbytes: int


class BlobFile:
    """A blob being written. Fulfils ``Sink``."""

    def __init__(self, home: Path, name: str, nbytes: int, files: Files) -> None:
        """Made by ``BlobFolder``; raises ``OSError``."""
        self._home, self._name, self._nbytes, self._files = home, name, nbytes, files
        # Two senders may be at the same blob: one that was given up, and its second try.
        self._draft = home / f".{name}.bin.draft-{os.getpid()}-{secrets.token_hex(4)}"
        self._held = HeldFolder(home)
        try:
            self._writer: FileWriter | None = files.create(self._draft)
        except BaseException:
            self._held.close()
            raise
        self._at = self._synced = 0

    def write(self, data: Any) -> None:
        """Write the next bytes."""
        assert self._writer is not None
        with _as_tier_error("write", self._home):
            self._writer.write_at(self._at, data)
            self._at += memoryview(data).nbytes
            if self._at - self._synced >= _SYNC_BYTES:
                self._writer.sync()
                self._synced = self._at

    def seal(self, record: bytes) -> None:
        """Sync the data, give it its name, then write the record."""
        assert self._writer is not None
        if self._at != self._nbytes:
            raise TierError(f"{self._name} has {self._nbytes} bytes, but {self._at} were given")
        with _as_tier_error("write", self._home):
            self._writer.sync()
            self._writer.close()
            self._files.publish(self._draft, self._home / f"{self._name}.bin")
            self._writer = None
            try:
                path = self._home / f"{self._name}.json"
                self._files.write_whole(path, record, held=self._held)
            except OSError:
                self._forget()
                raise

    def wait(self) -> None:
        """``seal`` did it all."""

    def close(self) -> None:
        """Forget the draft, if it was not published."""
        self._held.close()
        if self._writer is not None:
            self._writer.close()
            self._writer = None
            with suppress(OSError):
                self._draft.unlink()

    def _forget(self) -> None:
        """Remove data that has no record, neither this one nor that of an older blob."""
        with suppress(OSError):
            if not (self._home / f"{self._name}.json").exists():
                (self._home / f"{self._name}.bin").unlink()


@dataclass(frozen=True)
class _Part:
    """A part of a file, read when it is waited for. Fulfils ``Pending``."""

    path: Path
    start: int

    def into(self, out: Any) -> None:
        """Read it."""
        try:
            with os.fdopen(open_regular(self.path), "rb", buffering=0) as file:
                file.seek(self.start)
                _read_all(file, self.path, memoryview(out).cast("B"))
        except OSError as error:
            raise CheckpointError(f"cannot read {self.path}: {error.strerror or error}") from error

    def close(self) -> None:
        """Nothing was opened."""


def _unfinished(names: Collection[str]) -> set[str]:
    data = {name for name in names if name.endswith(".bin") and not name.startswith(".")}
    lost = {name for name in data if name.removesuffix(".bin") + ".json" not in names}
    return lost | {name for name in names if is_draft(name)}


def _read_all(file: Any, path: Path, memory: memoryview) -> None:
    while memory:
        count = file.readinto(memory)
        if not count:
            raise CheckpointError(f"{path} is truncated")
        memory = memory[count:]


def _entries(folder: Path) -> list[str]:
    try:
        return sorted(entry.name for entry in folder.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []


@contextmanager
def _as_tier_error(verb: str, place: Path) -> Iterator[None]:
    try:
        yield
    except TierError:
        raise
    except OSError as error:
        raise tier_error(f"cannot {verb} {place}", error) from error
