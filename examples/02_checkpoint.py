"""The plain loop with one line more: it saves every few steps, and goes on where it was.

Install, in a copy of the repository:   pip install '.[cli,checkpoint]'

Start it:                sapwood run -n 2 examples/02_checkpoint.py
Stop it, kill it, start it again, on one rank or on four:

                         sapwood run -n 4 examples/02_checkpoint.py --steps 400

If a rank is sent SIGTERM, all ranks save and stop, and `sapwood run -n 2 --restarts 3` starts them
again. After `--time-limit` they save and the exit code is 75; nothing is restarted.

Then look at what it left:   sapwood ckpt ls ckpts
"""

import argparse

import torch
from torch import nn

import sapwood


def make_model() -> nn.Module:
    return nn.Sequential(
        nn.Linear(64, 512), nn.ReLU(), nn.Dropout(0.1), nn.Linear(512, 512), nn.ReLU(),
        nn.Linear(512, 10),
    )  # fmt: skip


class Samples:
    """Samples made on the fly; where this rank is in them is part of its checkpoint."""

    def __init__(self, size: int, rank: int) -> None:
        self.size = size
        self.projection = torch.randn(64, 10, generator=torch.Generator().manual_seed(1))
        self.own = torch.Generator().manual_seed(100 + rank)

    def batch(self) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.randn(self.size, 64, generator=self.own)
        return x, (x @ self.projection).argmax(dim=1)

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {"generator": self.own.get_state()}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        self.own.set_state(state["generator"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200, help="the step to train to")
    parser.add_argument("--every", type=int, default=15, help="steps between checkpoints")
    parser.add_argument("--time-limit", help="have stopped by then, such as 3h55m")
    parser.add_argument("--place", default="ckpts", help="a folder, or s3://bucket/prefix")
    options = parser.parse_args()

    torch.manual_seed(0)
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 1000)

    # Left away when not given: time_limit=None would switch off what SAPWOOD_RUN_TIME_LIMIT says.
    limit = {"time_limit": options.time_limit} if options.time_limit else {}
    with sapwood.Run(model, optimizer, schedulers=[scheduler], **limit) as run:
        samples = Samples(128, run.rank)
        with sapwood.Checkpointer(
            run, options.place, every=options.every, own={"samples": samples}
        ) as ckpt:
            ckpt.restore_latest()
            if run.rank == 0:
                print(f"{run.world} ranks, from step {run.step_count}")
            while run.step_count < options.steps:
                x, y = samples.batch()
                loss = nn.functional.cross_entropy(run.model(x), y)
                loss.backward()
                ckpt.metrics["loss"] = loss.item()
                run.step()
                if run.rank == 0 and run.step_count % 20 == 0:
                    print(f"step {run.step_count:4d}  loss {loss.item():.4f}")
            ckpt.save()  # whatever the last step was
        if run.rank == 0:
            blocked = [save.blocking_seconds * 1e3 for save in ckpt.stats.saves]
            print(f"{len(blocked)} checkpoints kept training waiting {sum(blocked):.1f} ms in all")


if __name__ == "__main__":
    main()
