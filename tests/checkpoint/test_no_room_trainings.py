"""A full disk, or a save that came to nothing, where trainings or branches share a place."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import pytest

from sapwood.checkpoint.order import Order
from sapwood.checkpoint.pruner import Pruner
from sapwood.checkpoint.retention import last
from sapwood.tiers.external import ExternalTier
from sapwood.tiers.record import CheckpointId, Lineage
from tests.checkpoint.test_identity import Saved, steps
from tests.checkpoint.test_no_room import EXTERNAL, disk
from tests.tiers.shards import shard

A, B, C = "aaaaaa", "bbbbbb", "cccccc"


def lineage(root: str, *ancestry: CheckpointId, began: float = 1.0) -> Lineage:
    return Lineage(run="some-run", began=began, root=root, ancestry=ancestry)


def put(tier: ExternalTier, step: int, attempt: str, of: Lineage, world: int = 1) -> None:
    record, data = shard(step, 0, world, attempt=attempt)
    tier.put(replace(record, lineage=of), data)


def there(tier: ExternalTier) -> list[str]:
    return sorted({str(stored.id) for stored in tier.shards()})


def test_room_is_never_made_of_another_training(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tier = ExternalTier(tmp_path / "tier")
    mine, other = lineage(A), lineage(B, began=2.0)
    for step in (1, 2):
        put(tier, step, B, other)
    put(tier, 3, A, mine)
    pruner = Pruner(tier, last(1), lambda id, name: tier.drop(id))
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            pruner.make_room(CheckpointId(5, A), mine)
    assert there(tier) == [f"00000001-{B}", f"00000002-{B}", f"00000003-{A}"]
    assert len([r for r in caplog.records if "another training" in r.getMessage()]) == 1
    put(tier, 4, A, mine)
    for _ in range(3):
        pruner.make_room(CheckpointId(5, A), mine)
    assert there(tier) == [f"00000001-{B}", f"00000002-{B}", f"00000004-{A}"]


def test_room_is_made_of_an_abandoned_branch_first(tmp_path: Path) -> None:
    tier = ExternalTier(tmp_path / "tier")
    first, second = lineage(A), lineage(A, CheckpointId(4, A), began=2.0)
    for step in (4, 6):
        put(tier, step, A, first)
    pruner = Pruner(tier, last(1), lambda id, name: tier.drop(id))
    for _ in range(2):
        pruner.make_room(CheckpointId(8, B), second)
    # What attempt b was restored from, although the other one is of a later step.
    assert there(tier) == [f"00000004-{A}"]


def test_nothing_sound_goes_for_the_sake_of_a_damaged_one(tmp_path: Path) -> None:
    tier = ExternalTier(tmp_path / "tier")
    mine = lineage(A)
    for step in (2, 4):
        put(tier, step, A, mine)
    pruner = Pruner(tier, last(2), lambda id, name: tier.drop(id))
    pruner.whole(CheckpointId(4, A), 4.0, {}, mine)
    (tmp_path / "tier" / f"00000004-{A}" / "shard-0.json").write_bytes(b"{}")
    tight = Pruner(tier, last(1), lambda id, name: tier.drop(id))
    for one in (pruner, tight):
        one.make_room(CheckpointId(6, A), mine)
    assert f"00000002-{A}" in there(tier)


def test_what_came_to_nothing_goes_only_if_it_is_of_the_training(tmp_path: Path) -> None:
    tier = ExternalTier(tmp_path / "tier")
    mine, other = lineage(A), lineage(C)
    put(tier, 2, A, mine, world=2)
    put(tier, 3, B, other, world=2)
    gone: list[CheckpointId] = []
    pruner = Pruner(tier, last(3), lambda id, name: gone.append(id))
    pruner.discard([CheckpointId(2, A), CheckpointId(3, B)], mine)
    assert gone == [CheckpointId(2, A)]


def test_steps_that_come_again_are_later_than_those_before_the_restore() -> None:
    order = Order()
    before, after = CheckpointId(8, B), CheckpointId(6, A)
    for id in (CheckpointId(6, B), before, after):
        order.come(id)
    assert order.before(before, after)
    assert not order.before(after, before)
    assert order.before(CheckpointId(6, B), before)


def test_a_restart_on_a_full_disk_makes_room_of_the_attempt_before(tmp_path: Path) -> None:
    with Saved(tmp_path, keep=2, tiers=EXTERNAL) as one:
        one.until(4)
        a = one.ckpt.stats.saves[-1].id.attempt
    with disk(tmp_path / "ckpts", room=2), Saved(tmp_path, keep=2, tiers=EXTERNAL) as one:
        assert one.ckpt.restore_latest() is not None
        one.until(6)
        last_one = one.ckpt.stats.saves[-1]
    assert last_one.durable.keys() == {"memory", "external"}
    assert (steps(tmp_path, a), steps(tmp_path, last_one.id.attempt)) == ([4], [6])


def test_another_training_on_a_full_disk_removes_nothing(tmp_path: Path) -> None:
    with Saved(tmp_path, keep=2, tiers=EXTERNAL) as one:
        one.until(4)
        a = one.ckpt.stats.saves[-1].id.attempt
    with disk(tmp_path / "ckpts", room=2), Saved(tmp_path, keep=1, tiers=EXTERNAL) as one:
        one.until(2)
        assert "external" in one.ckpt.stats.saves[-1].failed
    assert steps(tmp_path, a) == [2, 4]
