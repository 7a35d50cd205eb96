"""A folder of this node: the shards of its ranks, one data file and one record each.

The folder ``00000015-3f9a1c`` of a checkpoint holds ``shard-0.bin``, the shard's memory as it was
captured, and ``shard-0.json``, its record. The record is written last: it makes the shard be there.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from sapwood.errors import TierError
from sapwood.tiers.base import Stored, StoredShard
from sapwood.tiers.files import Files
from sapwood.tiers.record import CheckpointId, ShardRecord
from sapwood.tiers.shardfile import open_shard

__all__ = ["LocalTier"]

_RECORD = re.compile(r"shard-(\d+)\.json")


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
        draft = home / f".shard-{record.rank}.bin.draft-{os.getpid()}"
        try:
            self._files.make_folder(home)
            with self._files.create(draft) as writer:
                writer.write_at(0, data)
                writer.sync()
            self._files.publish(draft, home / f"shard-{record.rank}.bin")
            self._files.write_whole(home / f"shard-{record.rank}.json", record.encode())
        except OSError as error:
            with suppress(OSError):
                draft.unlink()
            raise TierError(f"cannot write {home}: {error.strerror or error}") from error

    def shards(self) -> Sequence[Stored]:
        """Every shard whose record is there."""
        found = []
        for home in self._homes():
            id = CheckpointId.parse(home.name)
            if id is not None:
                found += [Stored(id, rank) for rank in _ranks(home)]
        return sorted(found)

    def open(self, stored: Stored) -> StoredShard:
        """Open a shard, however it was stored."""
        return open_shard(self.folder / stored.id.folder, stored.rank)

    def drop(self, id: CheckpointId) -> None:
        """Take the records away first: a crash on the way leaves no shard that seems whole."""
        home = self.folder / id.folder
        try:
            for rank in _ranks(home):
                self._files.remove(home / f"shard-{rank}.json")
            if home.is_dir():
                self._files.sync_folder(home)
            self._files.remove_tree(home)
        except OSError as error:
            raise TierError(f"cannot remove {home}: {error.strerror or error}") from error

    def close(self) -> None:
        """Nothing runs."""

    def _homes(self) -> list[Path]:
        try:
            return sorted(self.folder.iterdir())
        except FileNotFoundError:
            return []
        except OSError as error:
            raise TierError(f"cannot list {self.folder}: {error.strerror or error}") from error


def _ranks(home: Path) -> list[int]:
    try:
        names = [entry.name for entry in home.iterdir()]
    except (FileNotFoundError, NotADirectoryError):
        return []
    return sorted(int(found[1]) for name in names if (found := _RECORD.fullmatch(name)))
