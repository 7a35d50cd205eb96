"""``sapwood ckpt`` and large state that is not in tensors."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import sapwood
from sapwood.tiers.external import ExternalTier
from tests.checkpoint.stateful import Box
from tests.checkpoint.training import Training
from tests.cli.checkpoints import WORLD, ask, flip, name, save, told
from tests.tiers.shards import plan, shard

LARGE = 70_001


def test_inspect_and_verify_see_it_and_damage_to_it(capsys):
    save("ckpts", 5, extras=LARGE)
    found = ask(capsys, "inspect")["extras"]
    assert found["bytes_of_large_state"] == {f"rank {rank}": LARGE for rank in range(WORLD)}
    assert ask(capsys, "verify")["damages"] == []
    flip(Path("ckpts") / name(5) / "shard-0.bin", plan(WORLD).shards[0].extras_at + 9)
    (damage,) = ask(capsys, "verify", code=1)["damages"]
    assert (damage["shard"], damage["file"]) == (0, "extras")
    assert damage["stop"] == LARGE


@pytest.mark.parametrize("damage", ["flip", "remove"])
def test_repair_brings_it_back_into_a_finished_checkpoint(capsys, damage: str):
    tier = ExternalTier(Path("ckpts"))
    for rank in range(WORLD):
        tier.put(*shard(5, rank, WORLD, extras=LARGE))
    save("scratch", 5, extras=LARGE)
    path = Path("ckpts") / name(5) / "shard-1.extras"
    before = path.read_bytes()
    if damage == "flip":
        flip(path, 100)
    else:
        path.unlink()
    assert ask(capsys, "verify", code=1)["damages"]
    told(capsys, "repair", "--from", "scratch", "--yes")
    assert path.read_bytes() == before
    assert ask(capsys, "verify")["damages"] == []


def test_export_has_the_optimizers_large_state_that_is_no_tensor(tmp_path: Path, capsys):
    training = Training(tmp_path, "sgd")
    history = [n / 3 for n in range(20_000)]
    training.step()
    training.optimizer.state[training.model.head.weight]["history"] = history
    with sapwood.Checkpointer(
        training.run, "ckpts", tiers=["external"], engine="sync", shared={"box": Box(b"x" * LARGE)}
    ) as c:
        c.save()
        training.optimizer.state[training.model.head.weight]["history"] = []
        c.restore_latest()
        assert training.optimizer.state[training.model.head.weight]["history"] == history
    training.close()
    told(capsys, "export", "latest", "model.pt", "--optimizer")
    found = torch.load("model.pt")
    assert found["optimizer"]["state"]["head.weight"]["history"] == history
