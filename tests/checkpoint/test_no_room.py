"""A disk that is full: what came to nothing goes first, then what the next one would replace."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

import sapwood
from sapwood.checkpoint.engine.base import Failed, Job, NoRoom
from sapwood.checkpoint.engine.pipeline import Pipeline
from sapwood.checkpoint.pruner import Pruner
from sapwood.checkpoint.retention import last
from sapwood.testing import faults, ranks
from sapwood.testing.ranks import rank
from sapwood.tiers.base import Stored
from sapwood.tiers.external import ExternalTier
from sapwood.tiers.local import LocalTier
from sapwood.tiers.record import CheckpointId
from sapwood.tiers.spec import TierSpec
from tests.checkpoint.engines import Rank, until
from tests.checkpoint.training import Training
from tests.storage.mounts import Mount, in_child
from tests.tiers.shards import ATTEMPT, fill, plan, shard

EXTERNAL = ("memory", TierSpec(kind="external", retries=2))


class Disk:
    """Has room for so many checkpoints, the one being written among them."""

    def __init__(self, place: Path, room: int) -> None:
        self.place, self.room = place, room

    def operation(self, op: str, path: Path, **_: Any) -> None:
        home = next((p for p in path.parents if p.parent == self.place), None)
        if op not in ("write", "resize") or home is None or not home.name[0].isdigit():
            return
        others = [p for p in self.place.iterdir() if p.name[0].isdigit() and p != home]
        if len(others) >= self.room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@contextmanager
def disk(place: Path, room: int) -> Iterator[Disk]:
    one = Disk(place, room)
    with faults.inject("files", one.operation, at=None):
        yield one


def entries(place: Path) -> list[str]:
    return sorted(p.name.partition("-")[0].lstrip("0") + p.suffix for p in place.iterdir())


def test_what_the_next_one_replaces_goes_before_it(tmp_path: Path) -> None:
    place = tmp_path / "ckpts"
    training = Training(tmp_path)
    with (
        disk(place, room=3),
        sapwood.Checkpointer(
            training.run, place, tiers=EXTERNAL, every=1, mode="sharded", engine="sync", keep=3
        ) as c,
    ):
        training.steps(6)
        assert [save.failed for save in c.stats.saves] == [{}] * 6
    training.close()
    assert entries(place) == ["4", "5", "6"]


def test_the_newest_whole_one_stays_and_saving_goes_on_when_there_is_room(tmp_path: Path) -> None:
    place = tmp_path / "ckpts"
    training = Training(tmp_path)
    with (
        disk(place, room=1) as full,
        sapwood.Checkpointer(
            training.run, place, tiers=EXTERNAL, every=1, mode="sharded", engine="sync", keep=1
        ) as c,
    ):
        training.steps(3)
        assert entries(place) == ["1"]  # and no folder of those that came to nothing
        for save in c.stats.saves[1:]:
            assert "No space left on device" in save.failed["external"]
            assert "keep fewer checkpoints" in save.failed["external"]
        full.room = 2
        training.steps(5)
        assert [save.failed for save in c.stats.saves[3:]] == [{}, {}]
    training.close()
    assert entries(place) == ["5"]


def test_a_training_that_starts_on_a_full_disk_makes_room_too(tmp_path: Path) -> None:
    place = tmp_path / "ckpts"
    for until_step in (3, 5):
        training = Training(tmp_path)
        with (
            disk(place, room=3),
            sapwood.Checkpointer(
                training.run, place, tiers=EXTERNAL, every=1, mode="sharded", engine="sync"
            ) as c,
        ):
            c.restore_latest()
            training.steps(until_step)
            assert not any(save.failed for save in c.stats.saves)
        training.close()
    assert entries(place) == ["3", "4", "5"]


def one_rank_without_room(folder: Path) -> list[dict[str, str]]:
    """Rank 1 alone finds the disk full, while steps 2 and 3 are saved."""
    place = folder / "ckpts"
    training = Training(folder)
    with (
        disk(place, room=99) as mine,
        sapwood.Checkpointer(
            training.run, place, tiers=EXTERNAL, every=1, mode="sharded", engine="sync", keep=2
        ) as c,
    ):
        for step in range(1, 6):
            mine.room = 0 if rank() == 1 and step in (2, 3) else 99
            training.steps(step)
            training.run.group.gather_text(f"step {step}", "is over")
    training.close()
    return [save.failed for save in c.stats.saves]


def test_what_other_ranks_brought_of_it_goes_once_a_newer_one_is_whole(tmp_path: Path) -> None:
    failed = ranks.spawn(one_rank_without_room, 2, tmp_path)
    assert [list(each) for each in failed[1]] == [[], ["external"], ["external"], [], []]
    assert entries(tmp_path / "ckpts") == ["4", "5"]


def test_a_pruner_makes_room_only_for_what_is_known_to_be_whole(tmp_path: Path) -> None:
    tier = LocalTier(tmp_path / "tier")
    for step in (1, 2):
        for number in (0, 1):
            tier.put(*shard(step, number, 2))
    tier.put(*shard(3, 0, 2))  # the other one is elsewhere, or nowhere
    pruner = Pruner(tier, last(1), lambda id, name: tier.drop(id))
    for _ in range(3):
        pruner.make_room(CheckpointId(4, ATTEMPT))
        assert sorted({s.id.step for s in tier.shards()}) == [2, 3]
    Pruner(tier, None, lambda id, name: tier.drop(id)).make_room(CheckpointId(4, ATTEMPT))
    assert sorted({s.id.step for s in tier.shards()}) == [2, 3]


# -- a file system that is really full -------------------------------------------------------

SMALL, LARGE = 400 * 1024, 8 * 2**20  # a checkpoint takes about 270 KB


@pytest.mark.parametrize("kind", ["local", "external"])
def test_a_pipeline_on_a_small_disk(kind: str, tmp_path: Path) -> None:
    folder = tmp_path / "disk"
    folder.mkdir()
    shards = plan(2, large=2**14)
    ids = [CheckpointId(step, ATTEMPT) for step in range(5)]

    def work(mount: Mount) -> None:
        tier = LocalTier(folder / "t") if kind == "local" else ExternalTier(folder / "t")
        told: list[Any] = []
        pipeline = Pipeline([(TierSpec(kind=kind, retries=1), tier)], told.append)

        def save(step: int) -> None:
            for number in (0, 1):
                job = Job(
                    id=ids[step],
                    rank=number,
                    arena=0,
                    plan=shards,
                    created=1.0,
                    extras={},
                    tiers=(kind,),
                )
                pipeline.submit(job, fill(shards, number, step), lambda: None)
            assert pipeline.drain(30)

        save(1)
        for step in (2, 3):
            save(step)
            final = [p for p in told if isinstance(p, Failed) and p.final]
            assert final[-1].id == ids[step]
            assert "No space left on device" in final[-1].message
            assert NoRoom(id=ids[step], tier=kind) in told
            pipeline._workers[kind].drain(30)
            assert tier.shards() == [Stored(ids[1], number) for number in (0, 1)]
            assert [p.name for p in (folder / "t").iterdir()] == [ids[1].folder]
        mount.change(nbytes=LARGE)
        save(4)
        assert [s.id for s in tier.shards()] == [ids[1]] * 2 + [ids[4]] * 2
        assert pipeline.close(30)

    in_child(folder, SMALL, work)


def test_an_engine_tells_its_ranks_that_there_is_no_room(tmp_path: Path) -> None:
    folder = tmp_path / "disk"
    folder.mkdir()

    def work(_: Mount) -> None:
        with closing(Rank(folder / "ckpts", large=2**15)) as one:
            arenas = [one.lend(), one.lend()]
            first = one.submit(1, arenas[0])
            assert one.engine.drain(30)
            second = one.submit(2, arenas[1])
            until(lambda: NoRoom(id=second, tier="external") in one.of(NoRoom), "it is told")
            one.engine.drop(first, ("external",))
            assert one.engine.drain(30)
            assert (2, "external") in one.durable()
            assert one.failed() == set()

    in_child(folder, SMALL, work)
