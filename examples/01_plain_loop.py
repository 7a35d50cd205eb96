"""A complete training script with Sapwood: an ordinary loop, and a `sapwood.Run` around it.

Install, in a copy of the repository:   pip install '.[cli]'

One process:             python examples/01_plain_loop.py
Two ranks:               sapwood run -n 2 examples/01_plain_loop.py
Two ranks, torchrun:     torchrun --standalone --nproc-per-node 2 examples/01_plain_loop.py

Then look at it:         sapwood runs
                         sapwood trace RUN            (RUN is the id the script shows)

Each rank draws its own samples; gradients are averaged and weights updated while `backward` is
still busy with the first layers. It takes a few seconds on a laptop.
"""

import argparse

import torch
from torch import nn

import sapwood


def make_model() -> nn.Module:
    return nn.Sequential(
        nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)
    )


def batches(steps: int, size: int, rank: int):
    """Samples made on the fly; the class is the largest of ten fixed projections."""
    projection = torch.randn(64, 10, generator=torch.Generator().manual_seed(1))
    own = torch.Generator().manual_seed(100 + rank)  # every rank sees other samples
    for _ in range(steps):
        x = torch.randn(size, 64, generator=own)
        yield x, (x @ projection).argmax(dim=1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=60, help="optimizer steps")
    parser.add_argument("--batch", type=int, default=128, help="samples per rank and step")
    parser.add_argument("--lr", type=float, default=1e-3, help="learning rate of AdamW")
    parser.add_argument("--folder", default="runs", help="where the run folder goes")
    options = parser.parse_args()

    torch.manual_seed(0)
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)

    with sapwood.Run(model, optimizer, folder=options.folder, trace=True) as run:
        for x, y in batches(options.steps, options.batch, run.rank):
            loss = nn.functional.cross_entropy(run.model(x), y)
            loss.backward()
            run.step()
            if run.rank == 0 and run.step_count % 20 == 0:
                print(f"step {run.step_count:4d}  loss {loss.item():.4f}")
        if run.rank == 0:
            print(f"run {run.id}: {run.world} ranks, {run.step_count} steps, in {run.folder}")


if __name__ == "__main__":
    main()
