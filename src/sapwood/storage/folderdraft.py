"""An object of a folder on its way."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from sapwood.errors import NotFound, StorageError
from sapwood.storage.base import Durability
from sapwood.storage.common import CommonDraft
from sapwood.storage.files import FileWriter

if TYPE_CHECKING:
    from sapwood.storage.folder import FolderKeeper

__all__ = ["DRAFTS", "FolderDraft", "prune"]

DRAFTS = ".drafts"
_GATHERED = 512 * 1024
"""Parts smaller than this are written with their neighbours."""
_SYNC_BYTES = 64 * 2**20
"""Sync this often, so that the last sync of a large object is not the only sign of life."""


class FolderDraft(CommonDraft):
    """A file in ``.drafts``. Fulfils ``Draft``."""

    def __init__(
        self,
        keeper: FolderKeeper,
        key: str,
        nbytes: int | None,
        *,
        replace: bool,
        durability: Durability,
    ) -> None:
        """Make the file; raises ``OSError``."""
        super().__init__(keeper, key, nbytes, replace=replace)
        self._folder = keeper
        self._files = keeper.files
        self._syncs = durability >= Durability.SYNCED
        self._synced = 0
        self._writer = self._made()

    def _made(self) -> FileWriter:
        home = self._folder.folder / DRAFTS
        for left in range(100, -1, -1):
            if not home.is_dir():
                self._folder.make_drafts()
            try:
                # What goes to the device now need not fill the page cache; what stays there is
                # read or mapped from it.
                return self._files.draft(home / secrets.token_hex(16), direct=self._syncs)
            except (FileExistsError, FileNotFoundError):  # swept in that moment
                if not left:
                    raise
        raise AssertionError("unreachable")

    def _take(self, parts: Sequence[memoryview]) -> None:
        at = self.written
        try:
            for small in _gathered(parts):
                if len(small) == 1:
                    self._writer.write_at(at, small[0])
                else:
                    self._writer.write_parts(at, small)
                at += sum(map(len, small))
                if self._syncs and at - self._synced >= _SYNC_BYTES:
                    self._writer.sync()
                    self._synced = at
        except OSError as error:
            failure = self._folder.failure("write", self._folder.path(self.key), error)
            self.discard()  # on a full disk, what came to nothing must not take the room
            raise failure from error

    def _publish(self) -> None:
        path, draft = self._folder.path(self.key), self._writer.path
        try:
            # Over a network, bytes that are on their way only would come after their name.
            if self._syncs or self._folder.on_network:
                self._writer.sync()
            if self.replace:
                self._folder.give_name(draft, path, lambda: self._files.publish(draft, path))
            else:
                self._folder.give_name(draft, path, lambda: self._link(path))
                # A file server keeps what is removed while it is open, under another name. And from
                # now on whoever sweeps may have the draft: the object is there.
                self._writer.close()
                with suppress(OSError):
                    self._files.remove(draft)
            if self._syncs:
                self._folder.sync_above(path)
            self._writer.close()
        except NotFound:
            raise StorageError(
                f"the draft of {path} is gone; somebody has removed it from {DRAFTS}"
            ) from None
        except StorageError:
            raise
        except OSError as error:
            raise self._folder.failure("publish", path, error) from error

    def _link(self, path: Path) -> None:
        try:
            self._files.link(self._writer.path, path)
        except FileExistsError:
            # A file server that did it, and whose answer got lost, is asked a second time.
            with suppress(OSError):
                if self._writer.path.samefile(path):
                    return
            raise

    def _forget(self) -> None:
        with suppress(OSError):
            self._writer.path.unlink()
        with suppress(OSError):
            self._writer.close()
        prune(self._folder.path(self.key).parent, self._folder.folder)


def prune(folder: Path, root: Path) -> None:
    """Remove folders that hold nothing, up to ``root``, which stays."""
    with suppress(OSError):
        while root in folder.parents:
            with suppress(FileNotFoundError):
                folder.rmdir()
            folder = folder.parent


def _gathered(parts: Sequence[memoryview]) -> Iterator[list[memoryview]]:
    """Large parts alone, small ones with those beside them."""
    batch: list[memoryview] = []
    nbytes = 0
    for part in parts:
        if len(part) >= _GATHERED or nbytes >= 16 * _GATHERED:
            if batch:
                yield batch
            batch, nbytes = [], 0
        if len(part) >= _GATHERED:
            yield [part]
        else:
            batch.append(part)
            nbytes += len(part)
    if batch:
        yield batch
