"""The plain loop with one line more: others can fork it while it runs, without stopping it.

Install, in a copy of the repository:   pip install '.[cli,checkpoint]'

Start it:                   sapwood run -n 2 examples/03_fork.py
Elsewhere, while it runs:   sapwood runs
                            sapwood fork 2026 -n 2 --set optimizer.lr=0.01 -- examples/03_fork.py

The fork goes on from the step the first one was at, with another learning rate; `sapwood runs`
shows it below its parent.
"""

import argparse
import time

import torch
from torch import nn

import sapwood


class Samples:
    """Samples made on the fly; where this rank is in them goes with a fork."""

    def __init__(self, seed: int) -> None:
        self.projection = torch.randn(64, 10, generator=torch.Generator().manual_seed(1))
        self.own = torch.Generator().manual_seed(seed)

    def batch(self) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.randn(128, 64, generator=self.own)
        return x, (x @ self.projection).argmax(dim=1)

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {"generator": self.own.get_state()}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        self.own.set_state(state["generator"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=2000, help="how many steps to train from here")
    parser.add_argument("--pause", type=float, default=0.01, help="seconds to rest after a step")
    options = parser.parse_args()

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU())
    model.append(nn.Linear(512, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    with sapwood.Run(model, optimizer) as run:
        seed = run.override("data.seed", None)  # a fork may be told to draw other samples
        samples = Samples((100 if seed is None else seed) + run.rank)
        run.allow_clones(own={"samples": samples} if seed is None else {})
        if run.rank == 0:
            parent = run.forked_from
            from_where = f"forked from {parent.run}" if parent else "a new run"
            print(f"{run.id}: {from_where}, {run.world} ranks, at step {run.step_count}")
        last = run.step_count + options.steps
        while run.step_count < last:
            x, y = samples.batch()
            loss = nn.functional.cross_entropy(run.model(x), y)
            loss.backward()
            run.step()
            time.sleep(options.pause)
            if run.rank == 0 and run.step_count % 100 == 0:
                rate = optimizer.param_groups[0]["lr"]
                print(f"{run.id}: step {run.step_count:5d}  loss {loss.item():.4f}  lr {rate:g}")
        if run.rank == 0:
            for fork in run.forks:
                late = "was sent, and has not begun" if fork.sent else "was not sent"
                how = "went its own way" if fork.done else fork.failure or late
                print(f"{run.id}: the fork of step {fork.step} {how}")


if __name__ == "__main__":
    main()
