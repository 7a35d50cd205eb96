"""Workloads have the true shapes, are the same everywhere, and can be learnt."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from sapwood.errors import ConfigError
from sapwood.testing import ranks, workloads

SMALL: dict[str, dict[str, Any]] = {
    "densenet121": {"width": 0.125, "image": 32, "classes": 4, "batch_size": 8},
    "emulated": {"preset": "uniform", "scale": 0.01, "speed": math.inf},
    "mlp": {"layers": 4},
    "nt3": {"mb": 0.5, "filters": 8},
    "resnet152": {"width": 0.0625, "image": 32, "classes": 4, "batch_size": 8},
    "resnet50": {"width": 0.125, "image": 32, "classes": 4, "batch_size": 8},
    "transformer": {"dim": 32, "vocab": 32, "seq": 16},
}
STEPS = {"densenet121": 16, "resnet152": 16, "transformer": 60}


def losses(work: workloads.Workload, steps: int) -> list[float]:
    model = work.model()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    seen = []
    for step in range(steps):
        inputs, targets = work.batch(step)
        optimizer.zero_grad()
        loss = work.loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        seen.append(loss.item())
    return seen


def few_losses(name: str) -> list[float]:
    return losses(workloads.by_name(name, **SMALL[name]), 2)


def test_every_workload_has_a_small_form_here() -> None:
    assert sorted(workloads.NAMES) == sorted(SMALL)


@pytest.mark.parametrize(
    ("name", "parameters", "tensors"),
    [
        ("resnet50", 25_557_032, 161),
        ("resnet152", 60_192_808, 467),
        ("densenet121", 7_978_856, 364),
    ],
)
def test_true_shapes_at_full_width(name: str, parameters: int, tensors: int) -> None:
    work = workloads.by_name(name)
    assert work.parameters == parameters
    assert work.parameter_bytes == parameters * 4
    with torch.device("meta"):
        assert len(list(work.build().parameters())) == tensors


@pytest.mark.parametrize("mb", [8.0, 100.0, 619.1])
def test_nt3_has_the_bytes_asked_for(mb: float) -> None:
    assert workloads.nt3(mb=mb).parameter_bytes == pytest.approx(mb * 1e6, abs=60e3)


def test_nt3_at_its_original_size_reads_a_profile_of_the_original_length() -> None:
    inputs, _ = workloads.nt3(mb=620, batch_size=1).batch(0)
    assert inputs.shape[-1] == pytest.approx(60_483, rel=0.01)


@pytest.mark.parametrize("layer_bytes", [24, 16_640, 1 << 20, 64 << 20])
def test_mlp_layers_have_the_bytes_asked_for(layer_bytes: int) -> None:
    work = workloads.mlp(layers=3, layer_bytes=layer_bytes)
    assert work.parameter_bytes / 3 == pytest.approx(layer_bytes, rel=0.01)


def test_tied_embeddings_are_one_tensor() -> None:
    tied, loose = workloads.transformer(), workloads.transformer(tied=False)
    model = tied.model()
    assert model.head.weight is model.tokens.weight
    assert loose.parameters - tied.parameters == 128 * 64


@pytest.mark.parametrize("name", sorted(SMALL))
def test_the_loss_falls(name: str) -> None:
    seen = losses(workloads.by_name(name, **SMALL[name]), STEPS.get(name, 30))
    assert sum(seen[-5:]) < 0.6 * sum(seen[:5]), seen


@pytest.mark.parametrize("name", sorted(SMALL))
def test_models_and_batches_are_fixed_by_the_seed(name: str) -> None:
    state = torch.random.get_rng_state()
    one, same, other = (workloads.by_name(name, seed=seed, **SMALL[name]) for seed in (1, 1, 2))
    for a, b in zip(one.model().parameters(), same.model().parameters(), strict=True):
        assert torch.equal(a, b)
    assert all(map(torch.equal, one.batch(3, 1, 2), same.batch(3, 1, 2)))
    assert not torch.equal(one.batch(3)[0], other.batch(3)[0])
    assert torch.equal(torch.random.get_rng_state(), state), "the global random state was touched"


def test_batches_differ_by_step_and_rank_but_not_by_world() -> None:
    work = workloads.mlp()
    first = work.batch(0, 0, 2)[0]
    assert not torch.equal(first, work.batch(1, 0, 2)[0])
    assert not torch.equal(first, work.batch(0, 1, 2)[0])
    assert torch.equal(first, work.batch(0, 0, 4)[0])


def test_the_global_batch_is_what_all_ranks_see() -> None:
    work = workloads.mlp()
    inputs, targets = work.global_batch(5, 3)
    for rank in range(3):
        x, y = work.batch(5, rank, 3)
        rows = slice(rank * work.batch_size, (rank + 1) * work.batch_size)
        assert torch.equal(inputs[rows], x)
        assert torch.equal(targets[rows], y)


def test_two_processes_compute_the_same_losses() -> None:
    for name in ("mlp", "transformer"):
        first, second = ranks.spawn(few_losses, 2, name)
        assert first == second


def test_wrong_options_are_refused_in_words() -> None:
    with pytest.raises(ConfigError, match="no workload is called 'alexnet'; there are densenet121"):
        workloads.by_name("alexnet")
    with pytest.raises(ConfigError, match=r"workload 'mlp': .*depth"):
        workloads.by_name("mlp", depth=3)
    with pytest.raises(ConfigError, match="the least is"):
        workloads.nt3(mb=0.1)
    with pytest.raises(ConfigError, match="image=16"):
        workloads.resnet50(image=16)
    with pytest.raises(ConfigError, match="not a multiple of heads"):
        workloads.transformer(dim=30)
    with pytest.raises(ConfigError, match="batch_size=0"):
        workloads.mlp(batch_size=0)
    with pytest.raises(ConfigError, match="rank=2 is not in a group of 2"):
        workloads.mlp().batch(0, 2, 2)
