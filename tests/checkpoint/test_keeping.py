"""Old checkpoints go once a newer one is whole, and never before."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import sapwood
from sapwood.checkpoint.pruner import Pruner
from sapwood.checkpoint.retention import any_of, best, every, last
from sapwood.testing import ranks
from sapwood.tiers.local import LocalTier
from sapwood.tiers.record import CheckpointId, Lineage
from tests.checkpoint.training import Training
from tests.tiers.shards import shard


def kept(place: Path) -> list[int]:
    return sorted(int(p.name.split("-")[0]) for p in place.iterdir() if p.name[0] != ".")


def test_a_pruner_also_judges_what_was_there_before(tmp_path: Path) -> None:
    place = tmp_path / "tier"
    tier = LocalTier(place)
    for step in (1, 2, 3):
        tier.put(*shard(step, 0, 1))
    pruner = Pruner(tier, last(2), lambda id, name: tier.drop(id))
    tier.put(*shard(4, 0, 1, attempt="00000b"))
    pruner.whole(CheckpointId(4, "00000b"), 4.0, {})
    assert kept(place) == [3, 4]


def test_what_is_newer_than_the_present_attempt_is_left_alone(tmp_path: Path) -> None:
    place = tmp_path / "tier"
    tier = LocalTier(place)
    for step in (10, 20, 30):
        tier.put(*shard(step, 0, 1))
    pruner = Pruner(tier, last(1), lambda id, name: tier.drop(id))
    tier.put(*shard(20, 0, 1, attempt="00000b"))
    pruner.whole(CheckpointId(20, "00000b"), 99.0, {})
    assert kept(place) == [20, 30]


def test_the_last_ones_of_a_run(tmp_path: Path) -> None:
    training = Training(tmp_path)
    place = tmp_path / "ckpts"
    with sapwood.Checkpointer(training.run, place, every=1, mode="lazy", keep=2, engine="sync"):
        training.steps(6)
    training.close()
    assert kept(place) == [5, 6]


def test_policies_and_metrics(tmp_path: Path) -> None:
    training = Training(tmp_path)
    place = tmp_path / "ckpts"
    policy = any_of(last(1), every(4), best(1, "loss", lower=True))
    losses = {1: 5.0, 2: 1.0, 3: 2.0, 4: 3.0, 5: 4.0, 6: 6.0, 7: 7.0}
    with sapwood.Checkpointer(training.run, place, retention=policy, engine="sync") as c:
        for step in range(1, 8):
            training.step()
            c.save(metrics={"loss": losses[step]})
    training.close()
    assert kept(place) == [2, 4, 7]


def train_and_keep(folder: Path) -> list[tuple[int, str]]:
    training = Training(folder)
    told: list[tuple[int, str]] = []
    with sapwood.Checkpointer(
        training.run,
        folder / "ckpts",
        every=1,
        mode="lazy",
        keep=2,
        engine="sync",
        on_durable=lambda report, tier: told.append((report.id.step, tier)),
    ):
        training.steps(5)
    training.close()
    return told


def test_rank_0_is_told_when_all_shards_are_safe(tmp_path: Path) -> None:
    told = ranks.spawn(train_and_keep, 2, tmp_path)
    expected = [(step, tier) for step in range(1, 6) for tier in ("memory", "external")]
    assert sorted(told[0]) == sorted(expected)
    assert told[1] == []
    assert kept(tmp_path / "ckpts") == [4, 5]


def test_where_that_is_in_another_tier_the_newest_ancestor_stays(tmp_path: Path) -> None:
    place = tmp_path / "tier"
    tier = LocalTier(place)
    first = Lineage(run="r", began=1.0, root="00000a")
    left = replace(first, began=2.0, ancestry=(CheckpointId(2, "00000a"),))
    third = replace(first, began=3.0, ancestry=(CheckpointId(4, "00000a"),))

    def put(step: int, attempt: str, lineage: Lineage) -> CheckpointId:
        record, memory = shard(step, 0, 1, attempt=attempt)
        tier.put(replace(record, lineage=lineage), memory)
        return record.id

    put(2, "00000a", first)
    put(3, "00000a", first)
    put(5, "00000c", left)
    pruner = Pruner(tier, last(1), lambda id, name: tier.drop(id))
    pruner.whole(put(6, "00000b", third), 6.0, {}, third, compared=False)
    assert kept(place) == [3, 6]


def test_what_replicas_were_restored_from_stays_until_a_newer_one_was_compared(
    tmp_path: Path,
) -> None:
    place = tmp_path / "tier"
    tier = LocalTier(place)
    first = Lineage(run="r", began=1.0, root="00000a")
    second = Lineage(run="r", began=2.0, root="00000a", ancestry=(CheckpointId(4, "00000a"),))

    def put(step: int, attempt: str, lineage: Lineage) -> CheckpointId:
        record, memory = shard(step, 0, 1, attempt=attempt)
        tier.put(replace(record, lineage=lineage), memory)
        return record.id

    for step in (4, 5):
        put(step, "00000a", first)
    pruner = Pruner(tier, last(1), lambda id, name: tier.drop(id))
    for step in (6, 7):
        pruner.whole(put(step, "00000b", second), float(step), {}, second, compared=False)
        assert kept(place) == [4, step]
    pruner.whole(put(8, "00000b", second), 8.0, {}, second)
    pruner.whole(put(9, "00000b", second), 9.0, {}, second)
    assert kept(place) == [9]
