"""Population-based training: the worst run gives way to a fork of the best, with another rate.

Install, in a copy of the repository:   pip install '.[cli,checkpoint]'

Start it:        python examples/04_population.py --members 3 --rounds 2
Through files:   python examples/04_population.py --members 3 --rounds 2 --approach file

Every round the member with the highest loss is ended (exploit), and the one with the lowest is
forked with its learning rate changed (explore). The best goes on while it is forked: with
`--approach file` it writes its state to a file and the fork reads it, as is done today.
"""

import argparse
import json
import random
import subprocess
import sys
import time
from pathlib import Path

import torch
from torch import nn

import sapwood

CHANGES = (0.5, 2.0)


# -- a member --------------------------------------------------------------------------------


def member(options: argparse.Namespace) -> None:
    """Train until ended; leave the loss where the controller finds it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 256), nn.Tanh(), nn.Linear(256, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=options.lr, momentum=0.9)
    teacher = torch.randn(32, 1, generator=torch.Generator().manual_seed(1))
    with sapwood.Run(model, optimizer, folder=options.folder) as run:
        run.allow_clones(approach=options.approach)
        while not (options.folder / "stop").exists():
            x = torch.randn(64, 32)
            loss = (run.model(x) - torch.sin(x @ teacher)).square().mean()
            loss.backward()
            run.step()
            rate = optimizer.param_groups[0]["lr"]
            entry = {"id": run.id, "step": run.step_count, "loss": loss.item(), "lr": rate}
            draft = run.folder / ".score"
            draft.write_text(json.dumps(entry))
            draft.replace(run.folder / "score.json")
            time.sleep(options.pause)


# -- the population --------------------------------------------------------------------------


class Population:
    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.running: list[subprocess.Popen[bytes]] = []

    def start(self, rate: float, parent: str | None = None) -> None:
        script = [__file__, "--member", "--folder", str(self.options.folder), "--lr", str(rate)]
        script += ["--approach", self.options.approach, "--pause", str(self.options.pause)]
        command = [sys.executable, "-m", "sapwood.cli"]
        if parent is None:
            command += ["run", *script]
        else:
            command += ["fork", parent, "--folder", str(self.options.folder)]
            command += ["--set", f"optimizer.lr={rate}", "--", *script]
        self.running.append(subprocess.Popen(command))

    def scores(self, members: int) -> list[dict]:
        """One score per living member, once all have one."""
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            found = {}
            for path in self.options.folder.glob("*/score.json"):
                if (path.parent / "address").exists():  # it still takes clones
                    found[path.parent.name] = json.loads(path.read_text())
            if len(found) >= members:
                return sorted(found.values(), key=lambda one: one["loss"])
            time.sleep(0.05)
        raise SystemExit("the members did not begin in time")

    def end(self, run_id: str) -> None:
        facts = (self.options.folder / run_id / "run.toml").read_text()
        pid = int(facts.partition("pid = ")[2].split()[0])
        for process in self.running:
            if _is_below(pid, process.pid):
                process.terminate()
                process.wait()

    def close(self) -> None:
        (self.options.folder / "stop").touch()
        for process in self.running:
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.terminate()
                process.wait()


def _is_below(pid: int, ancestor: int) -> bool:
    while pid > 1:
        if pid == ancestor:
            return True
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            return False
        pid = int(fields[1])
    return False


def population(options: argparse.Namespace) -> None:
    dice = random.Random(0)
    group = Population(options)
    try:
        for number in range(options.members):
            group.start(0.3 / 4**number)
        for turn in range(options.rounds):
            group.scores(options.members)
            time.sleep(options.seconds)
            scores = group.scores(options.members)
            best, worst = scores[0], scores[-1]
            rate = best["lr"] * dice.choice(CHANGES)
            print(
                f"round {turn + 1}: best {best['loss']:.4f} (lr {best['lr']:g}, step "
                f"{best['step']}), worst {worst['loss']:.4f} (lr {worst['lr']:g}); the best is "
                f"forked with lr {rate:g}",
                flush=True,
            )
            begun = time.perf_counter()
            known = {one["id"] for one in scores}
            group.start(rate, parent=best["id"])
            group.end(worst["id"])
            while not {one["id"] for one in group.scores(options.members)} - known:
                time.sleep(0.05)
            print(f"  it trains {time.perf_counter() - begun:.1f} s later", flush=True)
        best = group.scores(options.members)[0]
        print(f"best in the end: loss {best['loss']:.4f}, lr {best['lr']:g}, step {best['step']}")
    finally:
        group.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--members", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=2.0, help="length of a round")
    parser.add_argument("--pause", type=float, default=0.005, help="rest after a step")
    parser.add_argument("--approach", default="deepclone", help="deepclone, lazy, p2p or file")
    parser.add_argument("--folder", type=Path, default=Path("population"))
    parser.add_argument("--member", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--lr", type=float, default=0.1, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.member:
        member(options)
        return
    options.folder.mkdir(parents=True, exist_ok=True)
    population(options)


if __name__ == "__main__":
    main()
