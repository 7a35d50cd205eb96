"""What each rank of the demo runs: an ordinary training loop with a `sapwood.Run`.

Started by ``sapwood demo`` as ``sapwood run -n 2 -m sapwood.cli.demo.training ...``.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from pathlib import Path

import torch
from torch import nn

import sapwood

__all__ = ["main"]

_WIDTH, _LAYERS, _BATCH = 384, 5, 256


def main() -> None:
    """Train, count events, and leave what happened in a small JSON file."""
    options = _options()
    torch.manual_seed(0)
    model = _model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    # Small buckets, so that even this small model has several.
    run = sapwood.Run(
        model, optimizer, folder=options.folder, trace=True, first_bucket_mb=0.6, bucket_mb=0.6
    )
    with run:
        seen: Counter[int] = Counter()

        def count(event: sapwood.TensorUpdated) -> None:
            seen[event.bucket] += 1

        run.events.subscribe(sapwood.TensorUpdated, count, name="demo counter")
        losses = _train(run, options.steps)
        if run.rank == 0:
            told = {"run": str(run.folder), "losses": losses, "events": dict(seen)}
            options.result.write_text(json.dumps(told))


def _train(run: sapwood.Run, steps: int) -> list[float]:
    data = torch.Generator().manual_seed(run.rank)
    teacher = torch.randn(_WIDTH, 1, generator=torch.Generator().manual_seed(99))
    losses = []
    for _ in range(steps):
        x = torch.randn(_BATCH, _WIDTH, generator=data)
        y = torch.tanh(x @ teacher)
        loss = nn.functional.mse_loss(run.model(x), y)
        loss.backward()  # type: ignore[no-untyped-call]
        run.step()
        losses.append(float(loss.detach()))
    return losses


def _model() -> nn.Sequential:
    layers: list[nn.Module] = []
    for _ in range(_LAYERS):
        layers += [nn.Linear(_WIDTH, _WIDTH), nn.GELU()]
    return nn.Sequential(*layers, nn.Linear(_WIDTH, 1))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True, help="where run folders go")
    parser.add_argument("--result", type=Path, required=True, help="where to leave the numbers")
    parser.add_argument("--steps", type=int, default=30, help="optimizer steps")
    return parser.parse_args()


if __name__ == "__main__":
    main()
