"""Old and new checkpoints in tiers made of files, and children that die at a chosen call."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import closing
from pathlib import Path

import numpy as np

from sapwood.storage.files import Files
from sapwood.tiers.base import Stored, Tier
from sapwood.tiers.external import ExternalTier
from sapwood.tiers.local import LocalTier
from sapwood.tiers.packed import PackedTier
from sapwood.tiers.record import CheckpointId, ShardRecord
from tests.tiers.contract import read_all
from tests.tiers.shards import ATTEMPT, described, fill, plan, shard

OLD, NEW, NEXT = (CheckpointId(step, ATTEMPT) for step in (1, 2, 3))
WORLD = 2


class LinkedTier(PackedTier):
    """Is given shards that have hardly changed, and so references what is there."""


KINDS: dict[str, Callable[[Path, Files | None], Tier]] = {
    "local": lambda folder, files: LocalTier(folder, files=files),
    "packed": lambda folder, files: PackedTier(folder, files=files),
    "linked": lambda folder, files: LinkedTier(folder, files=files),
    "external": lambda folder, files: ExternalTier(folder, files=files),
}
_SHARDS: dict[tuple[Stored, bool], tuple[ShardRecord, np.ndarray]] = {}


def tier_in(kind: str, folder: Path, files: Files | None = None) -> Tier:
    return KINDS[kind](folder, files)


def given(id: CheckpointId, rank: int, tier: Tier | None = None) -> tuple[ShardRecord, np.ndarray]:
    """A shard's record and bytes, made once: they are the same each time."""
    linked = isinstance(tier, LinkedTier)
    key = Stored(id, rank), linked
    if key not in _SHARDS:
        make = hardly_changed if linked else shard
        _SHARDS[key] = make(id.step, rank, WORLD, large=2**14)
    return _SHARDS[key]


def hardly_changed(
    step: int, rank: int, world: int, *, large: int
) -> tuple[ShardRecord, np.ndarray]:
    """A shard of which only the optimizer's state is other than that of the step before."""
    shards = plan(world, large=2 * large, state=large)
    memory, other = fill(shards, rank, 0), fill(shards, rank, step)
    for piece in shards.shards[rank].pieces:
        if piece.key[0] == "optimizer":
            part = slice(piece.at, piece.at + piece.nbytes)
            memory[part] = other[part]
    return described(shards, rank, step, memory), memory


def ranks_of(id: CheckpointId) -> list[Stored]:
    return [Stored(id, rank) for rank in range(WORLD)]


def put_all(tier: Tier, id: CheckpointId, put: Callable[[Stored], object] | None = None) -> None:
    """Put every rank's shard; ``put`` hears of each that is safe."""
    for stored in ranks_of(id):
        tier.put(*given(id, stored.rank, tier))
        if put is not None:
            put(stored)


def check(tier: Tier, promised: Iterable[Stored]) -> list[Stored]:
    """All that was promised is there; all that is there is what was put, byte for byte."""
    listed = list(tier.shards())
    missing = set(promised) - set(listed)
    assert not missing, f"lost: {missing}"
    for stored in listed:
        record, memory = given(stored.id, stored.rank, tier)
        with closing(tier.open(stored)) as found:
            assert found.record == record
        assert np.array_equal(read_all(tier, stored), memory)
    if isinstance(tier, ExternalTier):
        for id in {s.id for s in listed if (tier.folder / s.id.folder).is_dir()}:
            tier.check(id)
    return listed


def drafts(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if ".draft" in path.name]
