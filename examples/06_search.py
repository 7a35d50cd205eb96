"""A small architecture search: each candidate starts from its best ancestor in a repository.

Install, in a copy of the repository:   pip install '.[cli,checkpoint]'

Run it:   python examples/06_search.py
See it:   sapwood store ls --at search-models

The same candidates are trained twice: from scratch, and from the stored model they have most layers
in common with. It counts the steps each needs until its loss on held-out data is low enough.
"""

import argparse
import random
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import sapwood

FEATURES, CLASSES = 32, 8
SAMPLE = torch.zeros(1, FEATURES)


class Task:
    """Points of a fixed function that no linear model can learn; the same for all candidates."""

    def __init__(self) -> None:
        chance = torch.Generator().manual_seed(0)
        teacher = [
            torch.randn(FEATURES, 64, generator=chance),
            torch.randn(64, CLASSES, generator=chance),
        ]
        x = torch.randn(6000, FEATURES, generator=chance)
        y = ((x @ teacher[0]).relu() @ teacher[1]).argmax(1)
        self.x, self.y = x[:5000], y[:5000]
        self.held_out = x[5000:], y[5000:]

    def loss(self, model: nn.Module) -> float:
        model.eval()
        with torch.no_grad():
            return float(F.cross_entropy(model(self.held_out[0]), self.held_out[1]))


def build(widths: tuple[int, ...]) -> nn.Sequential:
    layers: list[nn.Module] = []
    before = FEATURES
    for width in widths:
        layers += [nn.Linear(before, width), nn.ReLU()]
        before = width
    return nn.Sequential(*layers, nn.Linear(before, CLASSES))


def mutate(tried: list[tuple[int, ...]], chance: random.Random) -> tuple[int, ...]:
    """One layer more, or another width of the last one, of a candidate; none is tried twice."""
    while True:
        widths = chance.choice(tried)
        width = chance.choice([48, 64, 80, 96, 112, 128])
        found = (*widths, width) if chance.random() < 0.5 else (*widths[:-1], width)
        if len(found) <= 5 and found not in tried:
            return found


def train(model: nn.Module, task: Task, enough: float, most: int) -> tuple[int, float]:
    """Steps until the held-out loss is low enough, and that loss."""
    torch.manual_seed(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for step in range(most):
        if step % 10 == 0 and (loss := task.loss(model)) <= enough:
            return step, loss
        model.train()
        rows = torch.randint(len(task.x), (128,))
        optimizer.zero_grad()
        F.cross_entropy(model(task.x[rows]), task.y[rows]).backward()
        optimizer.step()
    return most, task.loss(model)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--candidates", type=int, default=8)
    parser.add_argument("--loss", type=float, default=0.75, help="low enough")
    parser.add_argument("--steps", type=int, default=1500, help="at most, for a candidate")
    parser.add_argument("--folder", type=Path, default=Path("search-models"))
    options = parser.parse_args()
    task, chance = Task(), random.Random(0)
    scratch = inherited = 0
    tried: list[tuple[int, ...]] = [(64, 64)]
    with sapwood.store.open(options.folder) as repo:
        for number in range(options.candidates):
            widths = tried[-1]
            torch.manual_seed(100 + number)
            model = build(widths)
            fresh = build(widths)
            fresh.load_state_dict(model.state_dict())
            done = repo.transfer(model, sample=SAMPLE, by="loss", lower=True)
            from_ancestor, loss = train(model, task, options.loss, options.steps)
            from_scratch, _ = train(fresh, task, options.loss, options.steps)
            parent = str(done.ancestor.record.reference) if done else None
            record = repo.save(
                model, "candidate", parent=parent, sample=SAMPLE,
                metrics={"loss": loss, "steps": from_ancestor}, note={"widths": list(widths)},
            )  # fmt: skip
            origin = f"from {done.ancestor}" if done else "from scratch"
            print(f"{record.reference} {widths}: {from_ancestor} steps {origin}")
            print(f"    {from_scratch} steps without")
            scratch, inherited = scratch + from_scratch, inherited + from_ancestor
            tried.append(mutate(tried, chance))
    times = scratch / max(inherited, 1)
    print(f"{inherited} steps with ancestors, {scratch} from scratch: {times:.1f} x")


if __name__ == "__main__":
    main()
