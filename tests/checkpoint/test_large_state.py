"""Large state beside tensors: an average of the weights, a replay buffer, a loader's position."""

from __future__ import annotations

import errno
import logging
import threading
import time
from collections import deque
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import sapwood
from sapwood.buffers import Arena
from sapwood.checkpoint.engine.wire import MAX_BODY
from sapwood.errors import CheckpointError
from sapwood.state import extras as extras_module
from sapwood.state.packed import unpack
from sapwood.testing import faults, ranks
from sapwood.tiers.base import Stored, StoredShard, read_range
from sapwood.tiers.external import ExternalTier
from sapwood.tiers.spec import TierSpec
from tests.checkpoint.stateful import Box, same_value
from tests.checkpoint.training import Training

MIB = 2**20


def counted(nbytes: int, begin: int = 0) -> torch.Tensor:
    """So many bytes, of which no two parts are alike."""
    return torch.arange(begin, begin + nbytes // 4, dtype=torch.int32)


@pytest.mark.parametrize("engine", ["node", "sync"])
def test_more_than_any_message_holds_comes_back(
    tmp_path: Path, engine: str, caplog: pytest.LogCaptureFixture
) -> None:
    large = counted(MAX_BODY)
    box = Box({"average": large, "buffer": deque([(1, np.arange(3))], maxlen=8)})
    training = Training(tmp_path)
    with (
        caplog.at_level(logging.WARNING, "sapwood"),
        sapwood.Checkpointer(
            training.run, tmp_path / "ckpts", engine=engine, shared={"box": box}
        ) as c,
    ):
        training.step()
        report = c.save()
        c.wait()
        assert (set(report.durable), report.failed) == ({"memory", "external"}, {})
        assert report.nbytes > MAX_BODY
        box.value = None
        assert c.restore_latest() is not None  # from memory
        assert torch.equal(box.value["average"], large)
    training.close()
    again, empty = Training(tmp_path), Box()
    with sapwood.Checkpointer(
        again.run, tmp_path / "ckpts", engine="sync", shared={"box": empty}
    ) as c:
        c.restore_latest()
    again.close()
    assert torch.equal(empty.value["average"], large)
    assert empty.value["buffer"].maxlen == 8
    assert same_value(empty.value["buffer"][0], (1, np.arange(3)))
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING], caplog.text
    (record,) = (tmp_path / "ckpts").glob("*/shard-0.json")
    assert record.stat().st_size < MIB  # which everybody who looks at a checkpoint reads


TIERS = {
    "local": ["local"],
    "packed": [TierSpec(kind="local", incremental=True, compress=True)],
    "local, then external": ["local", "external"],
    "memory": ["memory", "external"],
}


@pytest.mark.parametrize("tiers", TIERS)
def test_state_that_grows_and_shrinks_is_that_of_its_step(tmp_path: Path, tiers: str) -> None:
    """Staging memory is used again and again, for more and for less than before."""
    box = Box()
    sizes = [0, 300_000, 9 * MIB, 20_000, 0, 5 * MIB]
    training = Training(tmp_path)
    with sapwood.Checkpointer(
        training.run,
        tmp_path / "ckpts",
        tiers=TIERS[tiers],
        every=1,
        mode="lazy",
        keep=None,
        own={"box": box},
    ) as c:
        for step, size in enumerate(sizes, 1):
            box.value = counted(size, step)
            training.step()
            if step == len(sizes):
                c.wait()
                c.restore_latest()
                assert torch.equal(box.value, counted(size, step))
        c.wait()
        assert c.stats.failures == []
        for step, size in enumerate(sizes, 1):
            c.restore(step)
            assert torch.equal(box.value, counted(size, step))
    training.close()


@pytest.mark.parametrize("mode", ["lazy", "backward", "sharded"])
def test_what_is_saved_is_of_the_step_and_encoded_on_another_thread(
    tmp_path: Path, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoding: list[bool] = []
    pack = extras_module.pack

    def slow(*arguments: Any) -> Any:
        encoding.append(threading.current_thread() is threading.main_thread())
        time.sleep(0.02)
        return pack(*arguments)

    monkeypatch.setattr(extras_module, "pack", slow)
    box = Box(
        {"array": np.zeros(50_000), "tensor": torch.zeros(9), "list": [], "raw": bytearray(9)}
    )
    training = Training(tmp_path)
    with sapwood.Checkpointer(
        training.run, tmp_path / "ckpts", every=1, mode=mode, keep=None, shared={"box": box}
    ) as c:
        for step in range(1, 5):
            change(box, step)
            training.step()
            change(box, -1)  # while it may still be on its way
        c.wait()
        for step in range(1, 5):
            c.restore(step)
            expected = Box(box.value)
            change(expected, step)
            assert same_value(box.value, expected.value)
            assert set(box.value["array"]) == {float(step)}
    training.close()
    assert len(encoding) >= 4
    assert not any(encoding)


def change(box: Box, to: int) -> None:
    """In place, as a training does it."""
    box.value["array"][:] = to
    box.value["tensor"].fill_(to)
    box.value["list"][:] = [to] * 500
    box.value["raw"][:] = bytes([to % 256] * 9)


# -- ranks -----------------------------------------------------------------------------------


def save_on_ranks(folder: Path, tiers: list[str]) -> None:
    training = Training(folder)
    things: dict[str, Any] = {
        "shared": {"average": Box(counted(2 * MIB))},
        "own": {"buffer": Box(counted(MIB, training.rank))},
    }
    with sapwood.Checkpointer(training.run, folder / "ckpts", tiers=tiers, **things) as c:
        training.step()
        c.save()
        c.wait()
        assert c.stats.failures == []
    training.close()


def restore_on_ranks(folder: Path, tiers: list[str]) -> tuple[bool, Any]:
    training = Training(folder)
    average, buffer = Box(), Box()
    with sapwood.Checkpointer(
        training.run,
        folder / "ckpts",
        tiers=tiers,
        shared={"average": average},
        own={"buffer": buffer},
    ) as c:
        assert c.restore_latest() is not None
    training.close()
    return torch.equal(average.value, counted(2 * MIB)), buffer.value


def read_extras(shard: StoredShard) -> dict[str, Any]:
    region = memoryview(bytearray(shard.record.extras_bytes))
    for part in shard.record.extras_ranges:
        read_range(shard, part, region[part.start : part.start + part.nbytes])
    return unpack(shard.record.extras, region)


def test_shared_state_is_saved_once_and_each_rank_has_its_own(tmp_path: Path) -> None:
    ranks.spawn(save_on_ranks, 2, tmp_path, ["external"])
    tier = ExternalTier(tmp_path / "ckpts")
    shards = []
    for stored in tier.shards():
        with closing(tier.open(stored)) as shard:
            shards.append((shard.record, read_extras(shard)))
    (first, common), (second, own) = shards
    assert "average" in common["shared"]
    assert own["shared"] == own["optimizer"] == {}
    assert list(own["own"]) == ["buffer"]
    assert first.extras_bytes >= 3 * MIB
    assert MIB <= second.extras_bytes < 2 * MIB
    found = ranks.spawn(restore_on_ranks, 3, tmp_path, ["external"])
    assert [whole for whole, _ in found] == [True] * 3
    for rank, (_, mine) in enumerate(found[:2]):
        assert torch.equal(mine, counted(MIB, rank))
    assert found[2][1] is None


def test_it_is_sent_to_ranks_that_cannot_read_it(tmp_path: Path) -> None:
    def node(rank: int) -> dict[str, str]:
        return {"SAPWOOD_NODE": f"node{rank}", "SAPWOOD_CHECKPOINT_LINGER": "0"}

    ranks.spawn(save_on_ranks, 2, tmp_path, ["local"], env=node)
    found = ranks.spawn(restore_on_ranks, 2, tmp_path, ["local"], env=node)
    for rank, (whole, mine) in enumerate(found):
        assert whole
        assert torch.equal(mine, counted(MIB, rank))


# -- damage ----------------------------------------------------------------------------------


def flipped(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.parametrize("damage", [flipped, cut, Path.unlink])
def test_damage_to_it_is_noticed_and_an_older_one_restored(tmp_path: Path, damage: Any) -> None:
    box = Box()
    training = Training(tmp_path)
    place = tmp_path / "ckpts"
    with sapwood.Checkpointer(
        training.run, place, tiers=["external"], engine="sync", shared={"box": box}
    ) as c:
        for step in (1, 2):
            box.value = counted(5 * MIB, step)
            training.step()
            c.save()
        (path,) = place.glob("00000002-*/shard-0.extras")
        damage(path)
        restored = c.restore_latest()
        assert restored is not None
        assert restored.step == 1
        assert torch.equal(box.value, counted(5 * MIB, 1))
        with pytest.raises(CheckpointError):
            c.restore(2)
    training.close()
    assert ExternalTier(place).shards()[0] == Stored(restored.id, 0)


def test_a_mapping_that_cannot_be_made_is_a_failure_and_no_staging_memory_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def mapped_anew(arena: Arena) -> Arena:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    box = Box(counted(MIB))
    training = Training(tmp_path)
    options = {"engine": "sync", "patience": 0.1, "drain_timeout": 20.0}
    with sapwood.Checkpointer(
        training.run, tmp_path / "ckpts", shared={"box": box}, **options
    ) as c:
        training.step()
        with monkeypatch.context() as patch:
            patch.setattr(Arena, "mapped_anew", mapped_anew)
            for _ in range(3):  # more than there are buffers
                with pytest.raises(CheckpointError, match="Cannot allocate memory"):
                    c.save()
        assert c.save().durable
        assert [f.step for f in c.stats.failures] == [1, 1, 1]
    training.close()


def test_no_memory_for_it_is_a_failure_that_is_told(tmp_path: Path) -> None:
    box = Box(counted(MIB))
    training = Training(tmp_path)
    with sapwood.Checkpointer(
        training.run, tmp_path / "ckpts", engine="sync", shared={"box": box}
    ) as c:
        training.step()
        with (
            faults.inject("checkpoint.extras", "raise"),
            pytest.raises(CheckpointError, match="step 1 is not saved"),
        ):
            c.save()
        for _ in range(3):  # its staging memory is not lost
            c.save()
            box.value = counted(MIB, 3)
        assert [f.step for f in c.stats.failures] == [1]
    training.close()
