"""Reading the shards of a folder: as they were captured, or packed with an index."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sapwood.errors import CheckpointError, ConfigError
from sapwood.regular import open_regular, read_regular
from sapwood.tiers.base import StoredShard
from sapwood.tiers.digest import seal, unseal
from sapwood.tiers.record import Range, ShardRecord

__all__ = [
    "PackedShard",
    "Place",
    "ShardFile",
    "open_shard",
    "read_exactly",
    "sealed",
    "zstd_module",
]


def open_shard(home: Path, rank: int) -> StoredShard:
    """The shard of a rank in the folder of a checkpoint.

    Raises:
        CheckpointError: it is missing or damaged.
    """
    if (home / f"shard-{rank}.index").exists():
        return PackedShard(home, rank)
    return ShardFile(home / f"shard-{rank}.json", home / f"shard-{rank}.bin")


@dataclass(frozen=True, slots=True)
class Place:
    """Where a range is stored."""

    file: str
    offset: int
    nbytes: int
    codec: str
    """``raw`` or ``zstd``."""


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
            self.record = ShardRecord.decode(read_regular(record), str(record))
            self._fd = open_regular(data)
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


class PackedShard:
    """A shard with an index. Fulfils ``StoredShard``."""

    def __init__(self, home: Path, rank: int) -> None:
        self.home = home
        self._fds: dict[str, int] = {}
        record, index = home / f"shard-{rank}.json", home / f"shard-{rank}.index"
        try:
            self.record = ShardRecord.decode(read_regular(record), str(record))
            self.places = _unsealed(read_regular(index), str(index))
            for name in {place.file for place in self.places.values()}:
                self._fds[name] = open_regular(home / name)
        except OSError as error:
            self.close()
            raise CheckpointError(
                f"cannot read the shard in {home}: {error.strerror or error}"
            ) from error
        missing = [p for p in self.record.ranges if p.at not in self.places]
        if missing:
            self.close()
            raise CheckpointError(f"{index} lacks {len(missing)} ranges of its record")

    def read_into(self, part: Range, out: Any) -> None:
        """Read a range, and unpack it."""
        place = self.places[part.at]
        try:
            stored = os.pread(self._fds[place.file], place.nbytes, place.offset)
        except OSError as error:
            raise CheckpointError(
                f"cannot read {self.home / place.file}: {error.strerror or error}"
            ) from error
        raw = _decoded(stored, place.codec, part.nbytes)
        if len(stored) != place.nbytes or len(raw) != part.nbytes:
            raise CheckpointError(f"{self.home / place.file} is truncated or damaged")
        memoryview(out).cast("B")[:] = raw

    def close(self) -> None:
        """Close the files."""
        for fd in self._fds.values():
            os.close(fd)
        self._fds = {}


def sealed(places: Mapping[int, Place]) -> bytes:
    """An index as a file's content, with a checksum of itself."""
    rows = [[at, p.file, p.offset, p.nbytes, p.codec] for at, p in sorted(places.items())]
    body = json.dumps(rows, separators=(",", ":")).encode()
    return seal(body)


def _unsealed(content: bytes, what: str) -> dict[int, Place]:
    body = unseal(content, what)
    return {at: Place(str(f), int(o), int(n), str(c)) for at, f, o, n, c in json.loads(body)}


def _decoded(stored: bytes, codec: str, nbytes: int) -> bytes:
    if codec == "raw":
        return stored
    zstd = zstd_module()
    try:
        raw: bytes = zstd.ZstdDecompressor().decompress(stored, max_output_size=nbytes)
    except zstd.ZstdError as error:
        raise CheckpointError(f"a compressed range is damaged: {error}") from error
    return raw


def zstd_module() -> Any:
    """The zstandard package, or how to get it."""
    try:
        import zstandard
    except ModuleNotFoundError:
        raise ConfigError(
            "compressed checkpoints need zstandard: pip install 'sapwood[compression]'"
        ) from None
    return zstandard
