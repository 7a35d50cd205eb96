"""Optimizers and what steps them, as a Run does it bucket by bucket."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import sapwood
from sapwood.testing import ranks
from sapwood.testing.ranks import rank

ONES = torch.ones(1, 8)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))


def scaled(restored: bool, without: tuple[int, ...]) -> tuple[list[float], float]:
    """Train with a scaler; rank 1 has no batch in some steps, and nobody has one in step 3."""
    model = network()
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
    if restored:
        scaler.load_state_dict({**scaler.state_dict(), "scale": 4.0, "_growth_tracker": 1})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with sapwood.Run(model, optimizer, scaler=scaler, timeout=20.0) as run:
        for step in range(5):
            if step != 3 and (rank() == 0 or step not in without):
                scaler.scale(run.model(ONES).sum()).backward()
            run.step()
    return flat(model), scaler.get_scale()


def unscaled(without: tuple[int, ...]) -> list[float]:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(5):
        if step != 3:
            (model(ONES).sum() * (0.5 if step in without else 1.0)).backward()
            optimizer.step()
            optimizer.zero_grad()
    return flat(model)


def flat(model: nn.Module) -> list[float]:
    values: list[float] = torch.cat([p.detach().flatten() for p in model.parameters()]).tolist()
    return values


@pytest.mark.parametrize("restored", [False, True])
def test_a_rank_without_a_batch_in_the_first_step_has_a_scale(restored: bool) -> None:
    without = (0, 2)
    first, second = ranks.spawn(scaled, 2, restored, without, init=True)
    assert first == second
    assert first[0] == pytest.approx(unscaled(without), abs=1e-6)
    assert first[1] == (16.0 if restored else 32.0)  # 4 -> 8 -> 16; 8 -> 16 -> 32
