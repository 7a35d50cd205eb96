"""Weights read late in a model of which a part is compiled: right, or said."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import sapwood
from tests.parity import harness
from tests.parity.cases.late import READS, Late
from tests.sync import models

TINY = {"first_bucket_mb": 1e-4, "bucket_mb": 1e-4}


@pytest.fixture(autouse=True)
def _fresh_compiler() -> object:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def fused(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.5, fused=True)


class Compiled(nn.Module):
    """The part that reads the weight is compiled; the slow part is not."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 16)
        self.late = nn.Linear(16, 16, bias=False)
        self.head = nn.Linear(16, 4)
        self.read = torch.compile(self._read, backend="aot_eager")

    def _read(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.late.weight.detach().t())

    def forward(self, x: Tensor) -> Tensor:
        x = self.read(torch.tanh(self.first(x)))
        x = harness.pause(x, lambda: self.late.weight)
        return self.head(torch.tanh(self.late(x)))


def head_compiled(read: str) -> nn.Module:
    model = Late(READS[read])
    model.head.compile(backend="aot_eager")
    return model


BUILDS = {
    "the head is compiled": lambda: head_compiled("detach"),
    "the head is compiled, recompute": lambda: head_compiled("detach in recompute"),
    "the reading part is compiled": Compiled,
}


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # dynamo asks for it
@pytest.mark.parametrize("update", ["auto", "deferred"])
@pytest.mark.parametrize("name", BUILDS)
def test_a_late_read_beside_compiled_code(
    name: str, update: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, ours = (models.seeded(BUILDS[name]) for _ in range(2))
    monkeypatch.setattr(harness.Pause, "limit", 0.0)
    expected = models.train_plain(plain, fused(plain), 4)
    monkeypatch.setattr(harness.Pause, "limit", 0.02)
    with sapwood.Run(ours, fused(ours), update=update, **TINY) as run:
        got = [models.train_run_step(run, step)[0] for step in range(4)]
    assert got == expected
    assert models.same(models.weights(plain), models.weights(ours))
