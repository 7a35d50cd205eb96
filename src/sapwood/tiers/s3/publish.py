"""The published view of a checkpoint: standard safetensors files and a manifest.

Whoever puts the last record of a checkpoint claims this work with an object that only one can
create, so that ranks that finish together do not all do it. A claim is the rank's: if its engine
dies, the same rank's next try goes on. Everything here may be done twice, or by two at once: the
files come out the same bytes, and appear whole.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from sapwood.errors import CheckpointError, StorageError, TierError
from sapwood.state.catalog import FileLayout
from sapwood.storage.s3.multipart import CopyPart, DataPart, Multipart, UploadGoneError
from sapwood.storage.s3.objects import Objects
from sapwood.tiers.base import Stored
from sapwood.tiers.digest import matches
from sapwood.tiers.manifest import Manifest, join
from sapwood.tiers.record import CheckpointId, Range, ShardRecord
from sapwood.tiers.s3.manifests import manifest_name, read_manifest
from sapwood.tiers.s3.parts import HEADER, Part, Run, plan_parts
from sapwood.tiers.s3.shard import data_name
from sapwood.tiers.s3.upload import upload

__all__ = ["Publisher", "Source", "record_name", "stored_in"]

log = logging.getLogger(__name__)
_AT_ONCE = 8
"""Ranges verified together."""
_RECORD = re.compile(r"shard-(\d+)\.json")
_DATA = re.compile(r"shard-\d+\.bin")


def record_name(id: CheckpointId, rank: int) -> str:
    """The object of a shard's record: it makes the shard be there."""
    return f"{id.folder}/shard-{rank}.json"


def stored_in(names: Iterable[str]) -> list[Stored]:
    """The shards whose records are among the objects of a tier."""
    found = []
    for name in names:
        folder, _, last = name.partition("/")
        id, record = CheckpointId.parse(folder), _RECORD.fullmatch(last)
        if id is not None and record is not None:
            found.append(Stored(id, int(record[1])))
    return sorted(found)


@dataclass(frozen=True, slots=True)
class Source:
    """A shard this process has in memory, and need not ask for."""

    record: ShardRecord
    data: memoryview


class Publisher:
    """Makes the published view from shards that are all there."""

    def __init__(self, objects: Objects, multipart: Multipart) -> None:
        """It owns neither."""
        self._objects = objects
        self._multipart = multipart

    def published(self, id: CheckpointId) -> bool:
        """Whether the manifest is there."""
        return self._objects.size(manifest_name(id)) is not None

    def claim(self, id: CheckpointId, rank: int) -> bool:
        """Whether this rank is the one to publish."""
        name, mine = f"{id.folder}/claim.json", json.dumps({"rank": rank}).encode()
        if self._objects.create(name, mine):
            return True
        try:
            return self._objects.get(name) == mine
        except FileNotFoundError:
            return False  # the checkpoint is being dropped

    def publish(self, id: CheckpointId, world: int, mine: Source | None = None) -> None:
        """Make the files, then the manifest; it is no error if they are there.

        Raises:
            TierError, StorageError: it could not be done now.
            CheckpointError: the shards do not belong together.
        """
        contents = {rank: self._content(id, rank, mine) for rank in range(world)}
        records = _decoded(id, contents)
        first = records[0]
        manifest = join(contents, first, id.folder)
        again = self.published(id)
        sources = _Sources(records, mine, frozenset(self._objects.names(id.folder)))
        try:
            for layout in first.catalog.layouts.values():
                self._assemble(id, layout, sources)
        except (TierError, StorageError) as error:
            # By another engine, which has taken our uploads or the shards away?
            if self.published(id) and (isinstance(error, UploadGoneError) or not again):
                return
            raise
        self._tell(id, manifest.encode(), again=again)
        # Now all other uploads for this checkpoint are of engines that died, or came second.
        self.abort_uploads(id)
        self.tidy(id, sources.names)

    def tidy(self, id: CheckpointId, used: Collection[str] = ()) -> None:
        """Delete the shards' own bytes, if the manifest is there and the files are as it says.

        Those ``used`` for the files go, and those older than the manifest, which whoever put it
        did not come to. Younger ones stay: somebody puts them to mend a file.
        """
        entries = self._objects.entries(id.folder)
        manifest = entries.get(manifest_name(id))
        bins = [name for name in entries if _DATA.fullmatch(name.partition("/")[2])]
        if manifest is None or not bins:
            return
        try:
            files = self._manifest(id).files
        except CheckpointError as error:
            log.warning("the shards of checkpoint %s stay beside its files: %s", id, error)
            return
        there = {name.partition("/")[2]: entry.size for name, entry in entries.items()}
        if all(there.get(name) == size for name, size in files.items()):
            old = [n for n in bins if n in used or entries[n].changed < manifest.changed]
            self._objects.delete(old)

    def verify(self, id: CheckpointId, world: int) -> int:
        """Read the files and compare them with the shards' checksums; bytes read.

        Raises:
            CheckpointError: a file, or the manifest, is missing or damaged.
        """
        contents = {rank: self._content(id, rank, None) for rank in range(world)}
        records = list(_decoded(id, contents).values())
        total = 0
        for layout in records[0].catalog.layouts.values():
            name = f"{id.folder}/{layout.filename}"
            if self._objects.size(name) != layout.size:
                raise CheckpointError(f"{name} is missing or truncated")
            header = memoryview(bytearray(len(layout.header)))
            self._objects.read(name, 0, header)
            if header != layout.header:
                raise CheckpointError(f"{name} is damaged: its header is not what it should be")
            for record in records:
                parts = [part for part in record.ranges if part.piece.file == layout.file]
                for start in range(0, len(parts), _AT_ONCE):
                    self._verify(name, layout, parts[start : start + _AT_ONCE], record.algorithm)
            total += layout.size
        self._check(self._manifest(id), contents)
        return total

    def _check(self, manifest: Manifest, contents: Mapping[int, bytes]) -> None:
        """See that a manifest was made of these records."""
        if manifest.records and len(manifest.records) != len(contents):
            raise CheckpointError(
                f"{manifest_name(manifest.id)} is of {len(manifest.records)} shards, not of "
                f"{len(contents)}"
            )
        for rank, mark in enumerate(manifest.records):
            if not matches(contents[rank], mark, manifest.algorithm):
                name = record_name(manifest.id, rank)
                raise CheckpointError(f"{name} is not the one its manifest was made of")

    def _manifest(self, id: CheckpointId) -> Manifest:
        name = manifest_name(id)
        try:
            return read_manifest(self._objects.get(name), name)
        except FileNotFoundError as error:
            raise CheckpointError(f"{name} is missing") from error

    def _tell(self, id: CheckpointId, content: bytes, *, again: bool) -> None:
        """Put the manifest; one writer only, but for whoever mends what others published."""
        name = manifest_name(id)
        if not self._objects.create(name, content) and again:
            self._objects.put(name, content)

    def _verify(
        self, name: str, layout: FileLayout, parts: Sequence[Range], algorithm: str
    ) -> None:
        wanted = [
            (layout.start(p.piece.name) + p.piece.start + p.start, memoryview(bytearray(p.nbytes)))
            for p in parts
        ]
        self._objects.read_all(name, wanted)
        for part, (at, data) in zip(parts, wanted, strict=True):
            if not matches(data, part.digest, algorithm):
                raise CheckpointError(
                    f"{name} is damaged: bytes {at} to {at + part.nbytes} ({part.piece.name}) do "
                    "not match their checksum"
                )

    def abort_uploads(self, id: CheckpointId) -> None:
        """Give up all open uploads of a checkpoint."""
        for one in self._multipart.open_uploads(id.folder):
            self._multipart.abort(one.name, one.upload)

    def _content(self, id: CheckpointId, rank: int, mine: Source | None) -> bytes:
        """A shard's record as it is stored."""
        if mine is not None and mine.record.rank == rank:
            return mine.record.encode()
        name = record_name(id, rank)
        try:
            return self._objects.get(name)
        except FileNotFoundError as error:
            raise TierError(f"cannot publish checkpoint {id}: {name} is gone") from error

    def _assemble(self, id: CheckpointId, layout: FileLayout, sources: _Sources) -> None:
        name = f"{id.folder}/{layout.filename}"
        parts = plan_parts(layout, {rank: r.shard for rank, r in sources.records.items()})
        starts = accumulate((part.nbytes for part in parts), initial=0)
        gathers = [
            _Gather(name, layout, self._objects, sources, part, start)
            for part, start in zip(parts, starts, strict=False)
        ]
        if len(parts) == 1:
            self._objects.put(name, gathers[0].bytes())
        else:
            upload(self._multipart, name, [gather.source() for gather in gathers])


@dataclass(frozen=True, slots=True)
class _Sources:
    """Where the bytes of shards are."""

    records: Mapping[int, ShardRecord]
    mine: Source | None
    names: frozenset[str]
    """The objects there are."""

    def place(self, run: Run, file: str, at: int) -> tuple[str, int]:
        """Object and offset of a run: its shard's, or the file's itself, if that is published."""
        name = data_name(self.records[run.rank])
        return (name, run.at) if name in self.names else (file, at)


@dataclass(frozen=True, slots=True)
class _Gather:
    """Brings together the bytes of a part, or says where the server finds them."""

    name: str
    layout: FileLayout
    objects: Objects
    sources: _Sources
    part: Part
    start: int
    """Of the part in the file."""

    def source(self) -> DataPart | CopyPart:
        if not self.part.copied:
            return DataPart(self.bytes)
        (run,) = self.part.runs
        return CopyPart(*self.sources.place(run, self.name, self.start), run.nbytes)

    def bytes(self) -> memoryview:
        memory = memoryview(bytearray(self.part.nbytes))
        mine = self.sources.mine
        elsewhere: dict[str, list[tuple[int, memoryview]]] = {}
        at = 0
        for run in self.part.runs:
            out = memory[at : at + run.nbytes]
            if run.rank == HEADER:
                out[:] = self.layout.header[run.at : run.at + run.nbytes]
            elif mine is not None and mine.record.rank == run.rank:
                out[:] = mine.data[run.at : run.at + run.nbytes]
            else:
                name, offset = self.sources.place(run, self.name, self.start + at)
                elsewhere.setdefault(name, []).append((offset, out))
            at += run.nbytes
        for name, wanted in elsewhere.items():
            try:
                self.objects.read_all(name, wanted)
            except (FileNotFoundError, ValueError) as error:
                what = "is gone" if isinstance(error, FileNotFoundError) else "is truncated"
                raise TierError(f"cannot make {self.name}: {name} {what}") from error
        return memory


def _decoded(id: CheckpointId, contents: Mapping[int, bytes]) -> dict[int, ShardRecord]:
    return {r: ShardRecord.decode(text, record_name(id, r)) for r, text in contents.items()}
