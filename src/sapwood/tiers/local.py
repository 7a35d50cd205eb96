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

from sapwood.errors import CheckpointError, TierError
from sapwood.tiers.base import Stored
from sapwood.tiers.files import Files, draft_of
from sapwood.tiers.record import CheckpointId, Range, ShardRecord

__all__ = ["LocalTier", "ShardFile", "ranks_in", "read_exactly", "record_name"]

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
        data_file, record_file = home / f"shard-{record.rank}.bin", home / record_name(record.rank)
        draft = draft_of(data_file, "put")
        try:
            self._files.make_folder(home)
            with self._files.create(draft) as writer:
                writer.write_at(0, data)
                writer.sync()
            self._files.publish(draft, data_file)
            # Names need not reach the device in the order they were given: data first, for sure.
            self._files.sync_folder(home)
            self._files.write_whole(record_file, record.encode(), writer="put")
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
                found += [Stored(id, rank) for rank in ranks_in(home)]
        return sorted(found)

    def open(self, stored: Stored) -> ShardFile:
        """Open a shard's data file and read its record."""
        home = self.folder / stored.id.folder
        return ShardFile(home / record_name(stored.rank), home / f"shard-{stored.rank}.bin")

    def drop(self, id: CheckpointId) -> None:
        """Take the records away first: a crash on the way leaves no shard that seems whole."""
        home = self.folder / id.folder
        try:
            for rank in ranks_in(home):
                self._files.remove(home / record_name(rank))
            with suppress(FileNotFoundError):
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


class ShardFile:
    """A shard in a data file beside its record. Fulfils ``StoredShard``."""

    def __init__(self, record: Path, data: Path) -> None:
        """Open both.

        Raises:
            CheckpointError: one is missing or damaged.
        """
        self._path = data
        self._fd = -1
        try:
            self.record = ShardRecord.decode(record.read_bytes(), str(record))
            self._fd = os.open(data, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise CheckpointError(
                f"cannot read the shard in {record.parent}: {error.strerror or error}"
            ) from error
        size, expected = os.fstat(self._fd).st_size, self.record.nbytes
        if size != expected:
            self.close()
            raise CheckpointError(f"{data} has {size} bytes, its record says {expected}")

    def read_into(self, part: Range, out: Any) -> None:
        """Read a range."""
        read_exactly(self._fd, self._path, part.at, out)

    def close(self) -> None:
        """Close the data file."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def read_exactly(fd: int, path: Path, offset: int, out: Any) -> None:
    """Fill ``out`` from a file.

    Raises:
        CheckpointError: the file cannot be read, or ends before.
    """
    memory = memoryview(out).cast("B")
    while memory:
        try:
            count = os.preadv(fd, [memory], offset)
        except OSError as error:
            raise CheckpointError(f"cannot read {path}: {error.strerror or error}") from error
        if not count:
            raise CheckpointError(f"{path} is truncated: it ends at byte {offset}")
        memory, offset = memory[count:], offset + count


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
