"""A training on S3, saved and brought back bit for bit."""

from __future__ import annotations

from pathlib import Path

import safetensors.torch
import torch

import sapwood
from sapwood.storage.s3.objects import Objects
from sapwood.testing import ranks, seaweed
from sapwood.tiers.s3 import S3Tier
from tests.checkpoint.training import Training, same

STEPS = 4


def train(folder: Path, place: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    training = Training(folder)
    with sapwood.Checkpointer(training.run, place, every=2, engine="sync", keep=None) as c:
        losses = training.steps(STEPS)
        c.wait()
    state = training.state()
    training.close()
    return losses, state


def go_on(folder: Path, place: str, step: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    training = Training(folder)
    torch.manual_seed(77)
    with sapwood.Checkpointer(training.run, place, engine="sync") as c:
        assert c.restore(step).tiers == ("s3",)
    losses = training.steps(STEPS)
    state = training.state()
    training.close()
    return losses, state


def test_a_training_comes_back_from_s3(weed: seaweed.Server, place: str, tmp_path: Path) -> None:
    world = 2
    trained = ranks.spawn(train, world, tmp_path, place, env=weed.environment)
    again = ranks.spawn(go_on, world, tmp_path, place, 2, env=weed.environment)
    for (losses, state), (more, end) in zip(trained, again, strict=True):
        assert losses[2:] == more
        assert same(state, end)
    tier = S3Tier(place, **weed.access)
    ids = sorted({one.id for one in tier.shards()})
    assert [id.step for id in ids] == [2, 4]
    content = Objects(tier.place).get(f"{ids[-1].folder}/model.safetensors")
    for name, tensor in safetensors.torch.load(content).items():
        assert torch.equal(tensor, trained[0][1][name])
