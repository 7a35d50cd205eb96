"""A node's folder that stores less: unchanged ranges are referenced, others may be compressed.

Beside the data file and the record of a shard lies an index, which says for every range in which
file it is, where, and how it is encoded. A file of an older checkpoint that is referenced gets a
second name (a hard link) in the new folder: dropping the old checkpoint does not take it away, and
no folder ever depends on another. What is referenced was read and verified first, so that a bad
block on a disk does not spread.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

from sapwood.errors import CheckpointError
from sapwood.regular import read_regular
from sapwood.storage.files import Files, FileWriter, HeldFolder, draft_of
from sapwood.tiers.base import read_range, verify
from sapwood.tiers.local import LocalTier, forget_failed, record_name
from sapwood.tiers.record import Range, ShardRecord
from sapwood.tiers.room import tier_error
from sapwood.tiers.shardfile import PackedShard, Place, sealed, zstd_module

__all__ = ["PackedTier"]

WORTH_REFERENCING = 0.5
"""Old files stay as long as they are referenced, so it must save at least this share of a shard."""
_LEVEL = 1  # weights barely compress: what there is to win is won at once


class PackedTier(LocalTier):
    """Shards in a folder, stored sparingly. Fulfils ``Tier``."""

    def __init__(
        self,
        folder: Path,
        *,
        name: str = "local",
        files: Files | None = None,
        incremental: bool = True,
        compress: bool = False,
    ) -> None:
        """``incremental``: reference unchanged ranges. ``compress``: with zstd, where it helps."""
        super().__init__(folder, name=name, files=files)
        self._incremental = incremental
        self._encode = _compressor() if compress else None

    def put(self, record: ShardRecord, data: Any) -> None:
        """Write what is new, link what is not, then the index, then the record."""
        home = self.folder / record.id.folder
        draft = draft_of(home / f"shard-{record.rank}.bin", "put")
        try:
            self._files.make_folder(home)
            if self._has(record, home):
                self._files.sync_folder(home)
                return
            with HeldFolder(home) as held:
                places = self._reference(record, home)
                with self._files.create(draft) as writer:
                    places |= self._write(record, memoryview(data).cast("B"), places, writer)
                    writer.sync()
                self._files.publish(draft, home / f"shard-{record.rank}.bin")
                for name, content in (
                    (f"shard-{record.rank}.index", sealed(places)),
                    (record_name(record.rank), record.encode()),
                ):
                    self._files.write_whole(home / name, content, writer="put", held=held)
        except OSError as error:
            forget_failed(home, record.rank)
            raise tier_error(f"cannot write {home}", error) from error

    def _has(self, record: ShardRecord, home: Path) -> bool:
        """Whether this very shard is there already; what else is under its name gives way.

        Writing it again would put other files in place of those its index speaks of, and a crash
        in between leave none that fit: the last checkpoint, and so what is referenced, may be
        another one by now.
        """
        path = home / record_name(record.rank)
        if not path.exists():
            return False
        if read_regular(path) == record.encode():
            with suppress(CheckpointError), closing(PackedShard(home, record.rank)) as shard:
                verify(shard)
                return True
        self._files.remove(path)
        self._files.sync_folder(home)
        return False

    # -- writing -----------------------------------------------------------------------------

    def _write(
        self, record: ShardRecord, data: memoryview, known: Mapping[int, Place], writer: FileWriter
    ) -> dict[int, Place]:
        """Append the ranges that are not known yet; where they are now, by offset in the shard."""
        places = {}
        offset = 0
        for part in record.ranges:
            if part.at in known:
                continue
            raw = data[part.at : part.at + part.nbytes]
            stored, codec = self._encoded(raw)
            writer.write_at(offset, stored)
            places[part.at] = Place(f"shard-{record.rank}.bin", offset, len(stored), codec)
            offset += len(stored)
        return places

    def _encoded(self, raw: memoryview) -> tuple[Any, str]:
        if self._encode is not None:
            packed = self._encode(raw)
            if len(packed) < len(raw):
                return packed, "zstd"
        return raw, "raw"

    def _reference(self, record: ShardRecord, home: Path) -> dict[int, Place]:
        """Ranges the last checkpoint here holds with the same checksum, linked into ``home``."""
        before = self._before(record) if self._incremental else None
        if before is None:
            return {}
        with closing(before):
            same = _unchanged(record, before)
        if sum(p.nbytes for p in same) < WORTH_REFERENCING * record.nbytes:
            return {}
        names: dict[str, str] = {}
        places = {}
        for part in same:
            old = before.places[part.at]
            if old.file not in names:
                names[old.file] = self._link(before.home / old.file, home, record.rank, len(names))
            places[part.at] = Place(names[old.file], old.offset, old.nbytes, old.codec)
        return places

    def _link(self, source: Path, home: Path, rank: int, number: int) -> str:
        target = home / f"shard-{rank}.base-{number}.bin"
        try:
            self._files.link(source, target)
        except FileExistsError:  # left by an earlier try
            if not target.samefile(source):
                self._files.remove(target)
                self._files.link(source, target)
        return target.name

    def _before(self, record: ShardRecord) -> PackedShard | None:
        """The newest older shard of this rank that is whole and laid out alike."""
        for stored in reversed(self.shards()):
            if stored.rank != record.rank or stored.id.step >= record.id.step:
                continue
            try:
                shard = PackedShard(self.folder / stored.id.folder, record.rank)
            except CheckpointError:
                continue
            alike = (shard.record.shard, shard.record.catalog, shard.record.algorithm)
            if alike == (record.shard, record.catalog, record.algorithm):
                return shard
            shard.close()
        return None


def _unchanged(record: ShardRecord, before: PackedShard) -> list[Range]:
    marks = {part.at: (part.nbytes, part.digest) for part in before.record.ranges}
    buffer = memoryview(bytearray(record.range_bytes))
    found = []
    for part in record.ranges:
        if marks.get(part.at) == (part.nbytes, part.digest):
            with suppress(CheckpointError):
                read_range(before, part, buffer[: part.nbytes])
                found.append(part)
    return found


def _compressor() -> Callable[[memoryview], bytes]:
    compress: Callable[[memoryview], bytes] = zstd_module().ZstdCompressor(level=_LEVEL).compress
    return compress
