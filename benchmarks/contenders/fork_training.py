"""The trainings that are forked, which note when back-propagation begins and when a step ends."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from core.rank import Context
from torch import Tensor, nn

from .training import Ddp, Sapwood, Training, Workload

DONORS, CLONES = "donors", "clones"


class Noting(Training):
    backward_at = 0.0
    """When back-propagation began, in the last step."""
    ended_at = 0.0
    """When it and all updates had ended."""

    def loss(self, model: nn.Module) -> Tensor:
        loss = super().loss(model)
        self.backward_at = time.perf_counter()
        return loss


class ForkedDdp(Noting, Ddp):
    def step(self, before_update: Callable[[], None] = lambda: None) -> None:
        super().step(before_update)
        self.ended_at = time.perf_counter()


class ForkedSapwood(Noting, Sapwood):
    """It lets itself be cloned from the start, also while its ordinary steps are timed.

    With the smaller of the sizes that a run would try: steps take as long as with 25 MB, and less
    is left to send when the last bucket has been updated.
    """

    bucket_mb = 8.0

    def __init__(self, workload: Workload, context: Context) -> None:
        import sapwood

        super().__init__(workload, context)
        # Told before the clones are: what they do when a step ends is no part of the step.
        self.run.events.subscribe(sapwood.StepEnded, self.noticed, name="probe")
        self.run.allow_clones()

    def noticed(self, event: Any) -> None:
        self.ended_at = time.perf_counter()


@dataclass(kw_only=True)
class Fresh:
    """What a clone starts from: memory that is mapped, and holds nothing of use."""

    model: nn.Module
    optimizer: torch.optim.Optimizer

    def with_optimizer_state(self) -> Fresh:
        """For contenders that receive into tensors which exist."""
        for group in self.optimizer.param_groups:
            if not group["momentum"]:
                continue
            for parameter in group["params"]:
                state = torch.ones_like(parameter, requires_grad=False)
                self.optimizer.state[parameter]["momentum_buffer"] = state
        return self


def fresh(workload: Workload) -> Fresh:
    """Cheaper than random weights, which would be overwritten anyway."""
    with torch.device("meta"):
        model = workload.source.build()
    model.to_empty(device="cpu")
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.fill_(1)
    return Fresh(model=model, optimizer=workload.optimizer(model))
