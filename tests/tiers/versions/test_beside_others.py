"""Two trainings, readers, gc and cooling on one repository, all at once."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch

import sapwood.store
from sapwood.errors import Gone, ModelNotFound, StoreError
from sapwood.repository.local import LocalBackend
from sapwood.tiers.base import Stored, verify
from sapwood.tiers.record import CheckpointId, ShardRecord
from sapwood.tiers.versions import VersionTier
from sapwood.tiers.versions.facts import Origin
from tests.tiers.shards import ATTEMPT, described, fill, plan, shard

WORLD, KEEP = 2, 3
STEPS = int(os.environ.get("SAPWOOD_TEST_STEPS", "10"))
PLAN = plan(WORLD, large=2**16)


def changed(rank: int, step: int) -> tuple[ShardRecord, np.ndarray]:
    """Hardly other than the step before; one tensor never changes."""
    memory = fill(PLAN, rank, 0)
    for piece in PLAN.shards[rank].pieces:
        if piece.name != "small" and piece.nbytes >= 4:
            end = piece.at + piece.nbytes // 4 * 4
            memory[piece.at : end].view(np.uint32)[:] ^= np.uint32(step * 7)
    return described(PLAN, rank, step, memory), memory


def train(place: Path, name: str) -> None:
    with closing(VersionTier(str(place), Origin(series=name, name=name))) as tier:
        for step in range(1, STEPS + 1):
            for rank in range(WORLD):
                tier.put(*changed(rank, step))
            ids = sorted({stored.id for stored in tier.shards()})
            assert ids[-1] == CheckpointId(step, ATTEMPT)
            for old in ids[:-KEEP]:
                tier.drop(old)
            with closing(tier.open(Stored(ids[-KEEP:][0], step % WORLD))) as found:
                verify(found)


def read(place: Path, ended: threading.Event) -> None:
    with sapwood.store.open(place) as repo:
        while not ended.is_set():
            for record in repo.models():
                step = int(record.version.removeprefix("step-"))
                try:
                    value = repo.load(str(record.reference), layers="large")["large"]
                except (ModelNotFound, Gone):
                    continue  # retention was faster
                whole = value.reshape(-1).view(torch.uint8).numpy()
                for rank in range(WORLD):
                    _, memory = changed(rank, step)
                    for piece in PLAN.shards[rank].pieces:
                        if piece.key == ("model", "large"):
                            mine = memory[piece.at : piece.at + piece.nbytes]
                            assert np.array_equal(whole[piece.start : piece.stop], mine)


def care(place: Path, ended: threading.Event, *, cools: bool) -> None:
    with sapwood.store.open(place) as repo:
        while not ended.is_set():
            if cools:
                repo.cool(chain=2)
            repo.gc()


def test_nobody_disturbs_anybody(tmp_path: Path) -> None:
    place, ended = tmp_path / "models", threading.Event()
    sapwood.store.open(place).close()
    errors: list[BaseException] = []

    def watched(work: Callable[[], None]) -> threading.Thread:
        def run() -> None:
            try:
                work()
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        return thread

    others = [
        watched(lambda: read(place, ended)),
        watched(lambda: care(place, ended, cools=True)),
        watched(lambda: care(place, ended, cools=False)),
    ]
    trainings = [watched(lambda name=name: train(place, name)) for name in ("a", "b")]
    for thread in trainings:
        thread.join(300)
    ended.set()
    for thread in others:
        thread.join(60)
    assert errors == []
    assert not any(thread.is_alive() for thread in (*trainings, *others))
    with sapwood.store.open(place) as repo:
        assert len(repo.models()) == 2 * KEEP
        assert repo.models(".*") == []
        repo.gc(quiet=0.0)
        assert repo.verify().problems == []


def test_a_checkpoint_is_there_though_no_room_could_be_given_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(self: LocalBackend) -> int:
        raise StoreError("another process has been writing")

    monkeypatch.setattr(LocalBackend, "reclaim", fails)
    with (
        closing(VersionTier(str(tmp_path / "models"), Origin(series="x", name="x"))) as tier,
        caplog.at_level(logging.WARNING),
    ):
        for rank in range(2):
            tier.put(*shard(1, rank, 2))
        assert len(tier.shards()) == 2
        tier.drop(CheckpointId(1, ATTEMPT))
        assert list(tier.shards()) == []
    assert "is not given back for now" in caplog.text
