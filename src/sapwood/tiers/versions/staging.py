"""Keeping a rank's shard until those of all others are there, as a hidden version.

What is unchanged since an earlier version is not stored again: the hidden version refers to the
earlier tensor, so that it stays even if its own version is removed meanwhile.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import suppress

import numpy as np

from sapwood.errors import CheckpointError, Gone, ModelExists, ModelNotFound, SapwoodError
from sapwood.repository.base import (
    NOTHING,
    Backend,
    BlobPart,
    Mappable,
    NewModel,
    fresh,
)
from sapwood.repository.manifest import Manifest
from sapwood.repository.names import Reference
from sapwood.runtime import faults
from sapwood.state.catalog import Entry
from sapwood.state.safetensors import TORCH_NAMES
from sapwood.storage import Durability
from sapwood.tiers.record import CheckpointId, ShardRecord
from sapwood.tiers.versions.facts import Origin, StagedFacts, home_of, homes_in
from sapwood.tiers.versions.index import Version
from sapwood.tiers.versions.shard import StagedShard, structure_of

__all__ = ["open_staged", "remove_staged", "same_tensor", "stage", "staged_in"]

log = logging.getLogger(__name__)
_PROBE, _BLOCK = 4096, 2**20


def stage(
    backend: Backend,
    origin: Origin,
    record: ShardRecord,
    memory: memoryview,
    parent: Version | None,
    durability: Durability,
) -> None:
    """Keep a shard; again if it is there, which is no error. Another one in its place gives way."""
    content = record.encode()
    while True:
        try:
            _save(backend, origin, record, content, memory, parent, durability)
        except Gone:
            if parent is None:
                raise
            parent = None  # it was removed meanwhile: nothing is shared with it
        except ModelExists:
            if _has(backend, origin, record, content):
                return
            reference = Reference(home_of(origin.series, record.id), f"rank-{record.rank}")
            with suppress(ModelNotFound):
                backend.remove(reference)
        else:
            return


def _save(
    backend: Backend,
    origin: Origin,
    record: ShardRecord,
    content: bytes,
    memory: memoryview,
    parent: Version | None,
    durability: Durability,
) -> None:
    faults.point("tiers.stage", step=record.id.step, rank=record.rank)
    mapped = _mapped(parent, record)
    rows, blobs, sources, shared = [len(content)], [fresh(0)], [memoryview(content)], []
    for number, piece in enumerate(record.shard.pieces, 1):
        data = memory[piece.at : piece.at + piece.nbytes]
        entry = record.catalog.by_key[piece.key]
        blob = same_tensor(parent, entry)
        if blob != NOTHING and piece.nbytes and _same(parent, mapped, blob, piece.start, data):
            shared.append(number)
            rows.append(entry.nbytes)
            blobs.append(blob)
            continue
        rows.append(piece.nbytes)
        blobs.append(fresh(len(sources)) if piece.nbytes else NOTHING)
        if piece.nbytes:
            sources.append(data)
    if record.extras_bytes:
        rows.append(record.extras_bytes)
        blobs.append(fresh(len(sources)))
        sources.append(memory[record.shard.extras_at : record.nbytes])
    manifest = Manifest(
        ("uint8",) * len(rows),
        tuple((nbytes,) for nbytes in rows),
        tuple(blobs),
        (),
        structure_of(shared),
    )
    model = NewModel(
        name=home_of(origin.series, record.id),
        version=StagedFacts.version(record.rank),
        manifest=manifest,
        note=StagedFacts.note(origin, record.id),
    )
    backend.save(model, sources, {}, durability)


def _has(backend: Backend, origin: Origin, record: ShardRecord, content: bytes) -> bool:
    """Whether this very shard waits already."""
    try:
        return open_staged(backend, origin.series, record.id, record.rank).content == content
    except (CheckpointError, ModelNotFound):
        return False


def open_staged(
    backend: Backend,
    series: str,
    id: CheckpointId,
    rank: int,
    *,
    done: Callable[[], None] = lambda: None,
) -> StagedShard:
    """A shard that waits; ``done`` is called when it is closed.

    Raises:
        ModelNotFound: it does not.
        CheckpointError: it is damaged.
    """
    reference = Reference(home_of(series, id), StagedFacts.version(rank))
    _, manifest = backend.manifest(reference)
    return StagedShard(backend, manifest, f"shard {rank} of {id} in {backend.name}", done)


def staged_in(
    backend: Backend, series: str = "", id: CheckpointId | None = None
) -> dict[tuple[str, CheckpointId], list[StagedFacts]]:
    """The shards that wait, by series and checkpoint; those of every series without one."""
    pattern = homes_in(series) if id is None else home_of(series, id)
    found: dict[tuple[str, CheckpointId], list[StagedFacts]] = {}
    for record in backend.models(pattern):
        facts = StagedFacts.of(record)
        if facts is not None:
            found.setdefault((facts.origin.series, facts.id), []).append(facts)
    return found


def remove_staged(backend: Backend, series: str, id: CheckpointId) -> bool:
    """Remove what waits of a checkpoint; whether there was any."""
    found = backend.models(home_of(series, id))
    for record in found:
        with suppress(ModelNotFound):  # somebody else does it
            backend.remove(record.reference)
    return bool(found)


# -- what has not changed --------------------------------------------------------------------------


def same_tensor(parent: Version | None, entry: Entry) -> int:
    """The blob of an earlier version's tensor of this name, shape and dtype; else ``NOTHING``."""
    row = None if parent is None else parent.row(entry.key)
    if row is None or row.dtype != TORCH_NAMES[entry.dtype] or row.shape != entry.shape:
        return NOTHING
    return row.blob


def _mapped(parent: Version | None, record: ShardRecord) -> Mapping[int, memoryview]:
    """The earlier tensors where they lie, if the back end can do that."""
    if parent is None or not isinstance(parent.backend, Mappable):
        return {}
    keys = {piece.key for piece in record.shard.pieces if piece.nbytes}
    blobs = {same_tensor(parent, record.catalog.by_key[key]) for key in keys} - {NOTHING}
    try:
        return parent.backend.mapped(sorted(blobs)) or {}
    except SapwoodError as error:
        log.info("nothing is shared with %s: %s", parent.record.reference, error)
        return {}


def _same(
    parent: Version | None,
    mapped: Mapping[int, memoryview],
    blob: int,
    start: int,
    data: memoryview,
) -> bool:
    """Whether an earlier tensor has these bytes there; those that differ mostly do so at once."""
    assert parent is not None
    step, at = _PROBE, 0
    block = memoryview(bytearray(min(_BLOCK, len(data)))) if blob not in mapped else None
    while at < len(data):
        mine = data[at : at + step]
        if block is None:
            theirs = mapped[blob][start + at : start + at + len(mine)]
        else:
            theirs = block[: len(mine)]
            try:
                parent.backend.read([BlobPart(blob, start + at, theirs)])
            except SapwoodError:
                return False
        if not np.array_equal(np.frombuffer(mine, np.uint8), np.frombuffer(theirs, np.uint8)):
            return False
        at, step = at + step, _BLOCK
    return True
