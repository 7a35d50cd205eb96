"""A folder of this node: the shards of its ranks, one data file and one record each.

The folder ``00000015-3f9a1c`` of a checkpoint holds ``shard-0.bin``, the shard's memory as it was
captured, and ``shard-0.json``, its record. The record is written last: it makes the shard be there.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from sapwood.errors import CheckpointError, TierError
from sapwood.regular import read_regular
from sapwood.storage.files import Files, HeldFolder, draft_of
from sapwood.tiers.base import Stored, StoredShard
from sapwood.tiers.leftovers import Stale, clear_folders, is_draft
from sapwood.tiers.record import CheckpointId, ShardRecord
from sapwood.tiers.room import tier_error
from sapwood.tiers.shardfile import open_shard

__all__ = [
    "LocalTier",
    "entries_in",
    "forget_failed",
    "older_rests",
    "ranks_in",
    "record_name",
    "remove_rest",
]

log = logging.getLogger(__name__)
_RECORD = re.compile(r"shard-(\d+)\.json")
_DATA = re.compile(r"shard-(\d+)(?:\.base-\d+)?\.(?:bin|index)")


class LocalTier:
    """Shards in a folder on a disk of this node. Fulfils ``Tier``."""

    def __init__(self, folder: Path, *, name: str = "local", files: Files | None = None) -> None:
        """``folder`` is made when the first shard comes."""
        self.name = name
        self.folder = folder
        self._files = files or Files()

    def put(self, record: ShardRecord, data: Any) -> None:
        """Write the data file, then the record, each whole or not at all."""
        home = self.folder / record.id.folder
        data_file, record_file = home / f"shard-{record.rank}.bin", home / record_name(record.rank)
        draft = draft_of(data_file, "put")
        try:
            self._files.make_folder(home)
            with HeldFolder(home) as held:
                with self._files.create(draft) as writer:
                    writer.write_at(0, data)
                    writer.sync()
                self._files.publish(draft, data_file)
                # Names need not reach the device in the order they were given: data first.
                self._files.sync_folder(home)
                self._files.write_whole(record_file, record.encode(), writer="put", held=held)
        except OSError as error:
            forget_failed(home, record.rank)
            raise tier_error(f"cannot write {home}", error) from error

    def shards(self) -> Sequence[Stored]:
        """Every shard whose record is there."""
        found = []
        for home in entries_in(self.folder):
            id = CheckpointId.parse(home.name)
            if id is not None:
                found += [Stored(id, rank) for rank in ranks_in(home)]
        return sorted(found)

    def open(self, stored: Stored) -> StoredShard:
        """Open a shard, however it was stored."""
        return open_shard(self.folder / stored.id.folder, stored.rank)

    def record(self, stored: Stored) -> ShardRecord:
        """A shard's record, whatever has become of its data file."""
        path = self.folder / stored.id.folder / record_name(stored.rank)
        try:
            return ShardRecord.decode(read_regular(path), str(path))
        except OSError as error:
            raise CheckpointError(f"cannot read {path}: {error.strerror or error}") from error

    def drop(self, id: CheckpointId) -> None:
        """Take the records away first: a crash on the way leaves no shard that seems whole.

        What crashes have left of older checkpoints goes as well.
        """
        home = self.folder / id.folder
        try:
            for rest in older_rests(self.folder, id):
                remove_rest(self._files, rest)
            for rank in ranks_in(home):
                self._files.remove(home / record_name(rank))
            with suppress(FileNotFoundError):
                self._files.sync_folder(home)
            self._files.remove_tree(home)
        except OSError as error:
            raise TierError(f"cannot remove {home}: {error.strerror or error}") from error

    def clear(self, stale: Stale) -> list[CheckpointId]:
        """Remove drafts, and data files whose record never came; see ``tiers.leftovers``."""
        try:
            return clear_folders(self._files, self.folder, stale, _unfinished)
        except OSError as error:
            raise TierError(f"cannot clear up {self.folder}: {error.strerror or error}") from error

    def close(self) -> None:
        """Nothing runs."""


def forget_failed(home: Path, rank: int) -> None:
    """Remove what a ``put`` that failed has written: on a full disk, every byte counts.

    A shard whose record is there is whole, and stays.
    """
    with suppress(OSError):
        drafts = list(home.glob(f".shard-{rank}.*.draft-put"))
        whole = (home / record_name(rank)).exists()
        data = [] if whole else [p for p in home.glob(f"shard-{rank}.*") if _DATA.fullmatch(p.name)]
        for path in (*drafts, *data):
            path.unlink(missing_ok=True)
    with suppress(OSError):  # others' shards are in it
        home.rmdir()


def _unfinished(names: Collection[str]) -> set[str]:
    there = {found[1] for name in names if (found := _RECORD.fullmatch(name))}
    data = {name: found[1] for name in names if (found := _DATA.fullmatch(name))}
    lost = {name for name, rank in data.items() if rank not in there}
    return lost | {name for name in names if is_draft(name)}


def entries_in(folder: Path) -> list[Path]:
    """What is in a tier's folder, in order; nothing if it was never made.

    Raises:
        TierError: it cannot be looked at now.
    """
    try:
        return sorted(folder.iterdir())
    except FileNotFoundError:
        return []
    except OSError as error:
        raise TierError(f"cannot list {folder}: {error.strerror or error}") from error


def older_rests(folder: Path, id: CheckpointId, suffix: str = "") -> list[Path]:
    """Folders of checkpoints before ``id`` that have no record: what their writers left, dying.

    A training does not write there any more: a checkpoint is dropped when a newer one is whole, and
    every writer goes from older ones to newer ones. Another one that does writes it once more.
    """
    found = []
    for home in entries_in(folder):
        other = CheckpointId.parse(home.name.removesuffix(suffix))
        if other is None or other.step >= id.step or home.is_symlink() or not home.is_dir():
            continue
        if not ranks_in(home):
            found.append(home)
    return found


def remove_rest(files: Files, path: Path) -> None:
    """Remove what somebody has left behind; if that cannot be done, it is in nobody's way.

    It may be another user's, or open somewhere on NFS: retention must not end there.
    """
    try:
        files.remove_tree(path)
    except OSError as error:
        log.warning("%s is left over, and cannot be removed: %s", path, error.strerror or error)


def record_name(rank: int) -> str:
    """The file of a shard's record."""
    return f"shard-{rank}.json"


def ranks_in(home: Path) -> list[int]:
    """The ranks whose record is in a folder."""
    try:
        names = [entry.name for entry in home.iterdir()]
    except (FileNotFoundError, NotADirectoryError):
        return []
    return sorted(int(found[1]) for name in names if (found := _RECORD.fullmatch(name)))
