"""Putting a sound copy of a shard where one is missing or damaged."""

from __future__ import annotations

from contextlib import closing, suppress
from pathlib import Path

from sapwood.cli.verbs.ckpt.places import Place
from sapwood.cli.verbs.ckpt.survey import Copy
from sapwood.cli.verbs.ckpt.verify import check_copy
from sapwood.errors import CheckpointError, TierError
from sapwood.storage.files import Files
from sapwood.tiers.assembly import extras_name
from sapwood.tiers.base import Stored, StoredShard, read_range
from sapwood.tiers.external import ExternalTier
from sapwood.tiers.record import CheckpointId, Range

__all__ = ["is_sound", "mend"]


def is_sound(copy: Copy, id: CheckpointId) -> bool:
    """Whether every byte of a copy is as it was saved; reads all of it."""
    return next(check_copy(copy, id), None) is None


def mend(source: Copy, target: Place, id: CheckpointId) -> None:
    """Copy a shard, verified on the way, and read it back.

    Raises:
        CheckpointError: the source is damaged, or the target still is.
        TierError: the target cannot be written.
    """
    with closing(source.place.tier.open(Stored(id, source.rank))) as shard:
        record = shard.record
        memory = bytearray(record.nbytes)
        view = memoryview(memory)
        for part in record.ranges:
            read_range(shard, part, view[part.at : part.at + part.nbytes])
        home = None if target.folder is None else target.folder / id.folder
        refused: TierError | None = None
        try:
            if home is not None:
                _unpack(home, source.rank)
            target.tier.put(record, memory)
        except TierError as error:
            refused = error
        copy = Copy(target, source.rank, record)
        if is_sound(copy, id):
            return
        # A tier that has the shard already does not write it again: mend what is there.
        if home is not None and any(home.glob("*.safetensors")):
            _patch(home, shard)
            _renew_manifest(target, id)
    damage = next(check_copy(copy, id), None)
    if damage is not None:
        raise refused or CheckpointError(f"{target.label} could not be mended: {damage.problem}")


def _unpack(home: Path, rank: int) -> None:
    """Make room for the whole shard where a damaged one was stored sparingly, with an index."""
    index, files = home / f"shard-{rank}.index", Files()
    if not index.exists():
        return
    try:
        for path in (home / f"shard-{rank}.json", index, *home.glob(f"shard-{rank}.base-*.bin")):
            files.remove(path)
            files.sync_folder(home)
    except OSError as error:
        raise TierError(f"cannot mend {home}: {error.strerror or error}") from error


def _patch(home: Path, shard: StoredShard) -> None:
    """Write a shard's bytes and record into the files of a finished checkpoint.

    The bytes written are those the files must have, so a crash on the way makes nothing worse.
    """
    record, files = shard.record, Files()
    layouts = record.catalog.layouts
    buffer = memoryview(bytearray(record.range_bytes))
    try:
        for name, layout in layouts.items():
            path = home / layout.filename
            with files.share(path) as writer:
                writer.resize(layout.size)
                writer.write_at(0, layout.header)
                for part in (p for p in record.ranges if p.piece.file == name):
                    read_range(shard, part, buffer[: part.nbytes])
                    at = layout.start(part.piece.name) + _start(part)
                    writer.write_at(at, buffer[: part.nbytes])
                writer.sync()
        if record.extras_bytes:
            with files.share(home / extras_name(record.rank)) as writer:
                writer.resize(record.extras_bytes)
                for part in record.extras_ranges:
                    read_range(shard, part, buffer[: part.nbytes])
                    writer.write_at(part.start, buffer[: part.nbytes])
                writer.sync()
        files.write_whole(home / f"shard-{record.rank}.json", record.encode())
    except OSError as error:
        raise TierError(f"cannot mend {home}: {error.strerror or error}") from error


def _renew_manifest(target: Place, id: CheckpointId) -> None:
    """A record may be written otherwise now than it was: the manifest has its checksum."""
    tier = target.tier
    if isinstance(tier, ExternalTier) and tier.manifest_problem(id) is not None:
        with suppress(TierError):  # other records are damaged as well; their turn comes
            tier.write_manifest(id)


def _start(part: Range) -> int:
    return part.piece.start + part.start
