"""What each rank of the demo runs: an ordinary training loop with a `sapwood.Run`.

Started by ``sapwood demo`` as ``sapwood run -n 2 -m sapwood.cli.demo.training ...``.
"""

from __future__ import annotations

import argparse
import json
import logging
import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import sapwood
from sapwood.runtime.folder import STARTED

__all__ = ["main"]

_WIDTH, _LAYERS, _BATCH = 384, 5, 256
_PATIENCE = 60.0


def main() -> None:
    """Train, count events, and leave what happened in a small JSON file."""
    options = _options()
    logging.getLogger(STARTED).disabled = True  # the demo says itself where its runs are
    torch.manual_seed(0)
    model = _model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    # Small buckets, so that even this small model has several.
    run = sapwood.Run(
        model, optimizer, folder=options.folder, trace=True, first_bucket_mb=0.6, bucket_mb=0.6
    )
    with run, ExitStack() as stack:
        samples = _Samples(run.rank)
        told: dict[str, Any] = {"run": str(run.folder)}
        if options.ckpts is not None:
            told |= _restore(stack, run, samples, options)
        if options.clones:
            run.allow_clones(own={"samples": samples})
            told |= {} if run.forked_from is None else {"from": run.forked_from.step}
        seen: Counter[int] = Counter()

        def count(event: sapwood.TensorUpdated) -> None:
            seen[event.bucket] += 1

        run.events.subscribe(sapwood.TensorUpdated, count, name="demo counter")
        told["losses"] = _train(run, samples, options)
        told["events"] = dict(seen)
        if run.rank == 0:
            options.result.write_text(json.dumps(told))


def _restore(
    stack: ExitStack, run: sapwood.Run, samples: _Samples, options: argparse.Namespace
) -> dict[str, Any]:
    ckpt = stack.enter_context(
        sapwood.Checkpointer(
            run, options.ckpts, every=options.every, mode="lazy", own={"samples": samples}
        )
    )
    loaded = ckpt.restore_latest()
    return {} if loaded is None else {"from": loaded.id.step, "tiers": loaded.tiers}


class _Samples:
    """Random samples of a fixed task; where a rank is in them is part of its checkpoint."""

    def __init__(self, rank: int) -> None:
        self._own = torch.Generator().manual_seed(rank)
        self._teacher = torch.randn(_WIDTH, 1, generator=torch.Generator().manual_seed(99))

    def batch(self) -> tuple[Tensor, Tensor]:
        x = torch.randn(_BATCH, _WIDTH, generator=self._own)
        return x, torch.tanh(x @ self._teacher)

    def state_dict(self) -> dict[str, Tensor]:
        return {"generator": self._own.get_state()}

    def load_state_dict(self, state: dict[str, Tensor], /) -> None:
        self._own.set_state(state["generator"])


def _train(run: sapwood.Run, samples: _Samples, options: argparse.Namespace) -> list[float]:
    losses = []
    while run.step_count < options.steps:
        if options.clones and run.forked_from is None:
            _let_clones_come(run, options.steps // 4)
        x, y = samples.batch()
        loss = nn.functional.mse_loss(run.model(x), y)
        loss.backward()  # type: ignore[no-untyped-call]
        run.step()
        losses.append(float(loss.detach()))
    return losses


def _let_clones_come(run: sapwood.Run, first: int) -> None:
    """A real training has many more steps than this one, and waits for nobody."""
    deadline = time.monotonic() + _PATIENCE
    while run.step_count >= first and time.monotonic() < deadline:
        asked = bool(run.forks)
        # They are told after one more step what there is to receive; rank 0 knows they are ready.
        if asked and (run.step_count == first or run.rank or run.forks[0].ready):
            return
        time.sleep(0.02)


def _model() -> nn.Sequential:
    layers: list[nn.Module] = []
    for _ in range(_LAYERS):
        layers += [nn.Linear(_WIDTH, _WIDTH), nn.GELU()]
    return nn.Sequential(*layers, nn.Linear(_WIDTH, 1))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True, help="where run folders go")
    parser.add_argument("--result", type=Path, required=True, help="where to leave the numbers")
    parser.add_argument("--steps", type=int, default=30, help="the step to train to")
    parser.add_argument("--ckpts", type=Path, help="save here, and go on from what is there")
    parser.add_argument("--clones", action="store_true", help="let others fork this run")
    parser.add_argument("--every", type=int, default=10, help="steps between checkpoints")
    return parser.parse_args()


if __name__ == "__main__":
    main()
