"""Shards on their way from tier to tier."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

from sapwood.checkpoint.engine.base import Durable, Failed, Job
from sapwood.checkpoint.engine.pipeline import Pipeline
from sapwood.tiers.base import Stored
from sapwood.tiers.external import ExternalTier
from sapwood.tiers.local import LocalTier
from sapwood.tiers.record import CheckpointId, ShardRecord
from sapwood.tiers.spec import TierSpec
from tests.tiers.contract import read_all
from tests.tiers.shards import ATTEMPT, described, fill, plan


class Slow(ExternalTier):
    """Begins to write when it is told to."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.begin = threading.Event()

    def put(self, record: ShardRecord, data: Any) -> None:
        assert self.begin.wait(30)
        super().put(record, data)


def test_what_a_slower_tier_will_read_is_not_removed_under_it(tmp_path: Path) -> None:
    local, slow = LocalTier(tmp_path / "local"), Slow(tmp_path / "external")
    told: list[Any] = []
    specs = (TierSpec(kind="local"), TierSpec(kind="external"))
    pipeline = Pipeline(list(zip(specs, (local, slow), strict=True)), told.append)
    shards = plan(1)
    ids = [CheckpointId(step, ATTEMPT) for step in (1, 2)]
    freed = {id: threading.Event() for id in ids}
    for id in ids:
        tiers = ("local", "external")
        job = Job(id=id, rank=0, arena=0, plan=shards, created=1.0, extras={}, tiers=tiers)
        # The first waits in the slow tier's hands; the second, queued behind, is read from disk.
        pipeline.submit(job, fill(shards, 0, id.step), freed[id].set)
    for id in ids:
        assert freed[id].wait(30)
        pipeline.drop(id, ("local",))
    assert len(local.shards()) == 2
    slow.begin.set()
    assert pipeline.drain(30)
    assert pipeline.close(30)
    assert [type(one).__name__ for one in told if type(one).__name__ == "Failed"] == []
    assert local.shards() == []
    for id in ids:
        assert bytes(read_all(slow, Stored(id, 0))) == bytes(fill(shards, 0, id.step))


def test_what_lies_on_disk_under_a_shards_name_is_not_taken_for_it(tmp_path: Path) -> None:
    """Between two tiers, the shard was saved anew, or its folder was replaced by hand."""
    local, external = LocalTier(tmp_path / "local"), ExternalTier(tmp_path / "external")
    told: list[Any] = []
    specs = (TierSpec(kind="local"), TierSpec(kind="external", retries=0))

    class Swapping(LocalTier):
        def put(self, record: ShardRecord, data: Any) -> None:
            super().put(record, data)
            other = fill(shards, 0, 99)
            super().put(described(shards, 0, 1, other), other)

    swapping = Swapping(tmp_path / "local")
    pipeline = Pipeline(list(zip(specs, (swapping, external), strict=True)), told.append)
    shards = plan(1)
    id = CheckpointId(1, ATTEMPT)
    tiers = ("local", "external")
    job = Job(id=id, rank=0, arena=0, plan=shards, created=1.0, extras={}, tiers=tiers)
    pipeline.submit(job, fill(shards, 0, 1), lambda: None)
    assert pipeline.close(30)
    durable = [one.tier for one in told if isinstance(one, Durable)]
    failed = [one.message for one in told if isinstance(one, Failed)]
    assert durable == ["local"]
    assert len(failed) == 1
    assert "another shard" in failed[0]
    assert external.shards() == []
    assert len(local.shards()) == 1
