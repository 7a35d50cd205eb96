"""What the demo shows, as a list of small scenes; a new system adds a scene of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from sapwood.cli.launch import Plan, launch
from sapwood.cli.script import Script
from sapwood.errors import LaunchError
from sapwood.runtime import faults
from sapwood.trace.read import Trace, read_trace
from sapwood.trace.steps import late_step
from sapwood.trace.summary import early_updates
from sapwood.trace.timeline import timeline_text

__all__ = ["SCENES", "Scene", "Stage"]

_BARS = "▁▂▃▄▅▆▇█"
_RANKS = 2
_PATIENCE = 60.0


class Stage:
    """What the scenes share: a folder, and what the training left in it."""

    def __init__(self, folder: Path, *, steps: int, width: int, keep: bool) -> None:
        """``keep`` says whether the folder outlives the demo."""
        self.folder = folder
        self.steps = steps
        self.width = width
        self.keep = keep

    @property
    def result(self) -> Path:
        """Where the training leaves its numbers."""
        return self.folder / "demo.json"

    @cached_property
    def run(self) -> Path:
        """The run folder the training made."""
        return Path(json.loads(self.result.read_text())["run"])

    @cached_property
    def losses(self) -> list[float]:
        """The losses of rank 0."""
        return [float(loss) for loss in json.loads(self.result.read_text())["losses"]]

    @cached_property
    def events(self) -> int:
        """How many TensorUpdated events the subscriber of rank 0 received."""
        return sum(json.loads(self.result.read_text())["events"].values())

    @cached_property
    def trace(self) -> Trace:
        """The trace the run wrote."""
        return read_trace(self.run / "trace")


@dataclass(frozen=True, slots=True)
class Scene:
    """A title, and what there is to say; lines are shown as they come."""

    title: str
    play: Callable[[Stage], Iterator[str]]


def train(stage: Stage) -> Iterator[str]:
    """Start two real processes, as ``sapwood run -n 2`` would."""
    yield f"{_RANKS} processes train a small network for {stage.steps} steps ..."
    _expect_success(_start(stage, stage.result))
    first, last = stage.losses[0], stage.losses[-1]
    yield f"loss {first:.4f} -> {last:.4f}  {_sparkline(stage.losses)}"


def one_step(stage: Stage) -> Iterator[str]:
    """Draw a typical late step."""
    yield "Digits are buckets. Those under a B were handled while backward was still busy."
    yield ""
    yield timeline_text(stage.trace, width=stage.width)


def early(stage: Stage) -> Iterator[str]:
    """Count the updates that did not wait for the end of backward."""
    step = late_step(stage.trace)
    for rank in stage.trace.ranks:
        soon, all_of_them = early_updates(stage.trace, rank=rank, step=step)
        in_all, updates = early_updates(stage.trace, rank=rank)
        yield (
            f"rank {rank}: {soon} of {all_of_them} buckets of step {step} were updated before the "
            f"last gradient existed (whole run: {in_all} of {updates})"
        )


def events(stage: Stage) -> Iterator[str]:
    """Report what a subscriber saw."""
    yield f"a subscriber of five lines received {stage.events} TensorUpdated events on rank 0:"
    yield "    run.events.subscribe(sapwood.TensorUpdated, count, name='demo counter')"
    yield "checkpoints and forks start from these events, as the next scenes show"


def recover(stage: Stage) -> Iterator[str]:
    """Kill both ranks in the middle of a step, and start again."""
    every = max(1, stage.steps // 4)
    fatal = 3 * every  # the step of the third checkpoint, which therefore is never taken
    result = stage.folder / "recovered.json"
    ckpts = ("--ckpts", stage.folder / "ckpts", "--every", every)
    yield f"the same training, with a checkpoint every {every} steps; both ranks are killed with"
    yield f"kill -9 in step {fatal} ..."
    os.environ[faults.ENV] = f"run.step:kill@{fatal}"
    try:
        with Path(os.devnull).open("w") as quiet, redirect_stderr(quiet):
            code = _start(stage, result, *ckpts)
    finally:
        del os.environ[faults.ENV]
    if code == 0 or result.exists():
        raise LaunchError("the demo's ranks were to be killed, but were not")
    _expect_success(_start(stage, result, *ckpts))
    told = json.loads(result.read_text())
    yield f"started again: the step restored is {told['from']}, from {', '.join(told['tiers'])}"
    same = told["losses"] == stage.losses[told["from"] :]
    word = "equal, bit for bit, to" if same else "DIFFERENT from"
    yield f"the losses of steps {told['from'] + 1} to {stage.steps} are {word} those of scene 1"


def fork(stage: Stage) -> Iterator[str]:
    """Start the training once more, and fork it from another terminal, so to speak."""
    parent, child = stage.folder / "parent.json", stage.folder / "child.json"
    yield "the same training once more; while it runs, `sapwood fork` starts two more ranks ..."
    command = [sys.executable, "-m", "sapwood.cli"]
    begun = subprocess.Popen([*command, "run", "-n", str(_RANKS), *_words(stage, parent)])
    try:
        run = _taking_clones(stage.folder, begun)
        words = ("--folder", str(stage.folder), "-n", str(_RANKS), "--", *_words(stage, child))
        _expect_success(subprocess.call([*command, "fork", str(run), *words]))
        _expect_success(begun.wait(_PATIENCE))
    finally:
        begun.terminate()
        begun.wait()
    told = json.loads(child.read_text())
    yield f"it did not stop, and the fork went its own way after step {told['from']}"
    same = told["losses"] == stage.losses[told["from"] :]
    word = "equal, bit for bit, to" if same else "DIFFERENT from"
    yield f"its losses of steps {told['from'] + 1} to {stage.steps} are {word} those of scene 1"
    yield "(with `--set optimizer.lr=0.01` it would learn at another rate from there)"


def _words(stage: Stage, result: Path) -> list[str]:
    arguments = ("--folder", stage.folder, "--result", result, "--steps", stage.steps, "--clones")
    return ["-m", "sapwood.cli.demo.training", *map(str, arguments)]


def _taking_clones(folder: Path, process: subprocess.Popen[bytes]) -> Path:
    deadline = time.monotonic() + _PATIENCE
    while time.monotonic() < deadline and process.poll() is None:
        for address in folder.glob("*/address"):
            return address.parent
        time.sleep(0.05)
    raise LaunchError("the demo's training did not begin; `sapwood doctor` looks for causes")


def _start(stage: Stage, result: Path, *more: object) -> int:
    arguments = ("--folder", stage.folder, "--result", result, "--steps", stage.steps, *more)
    script = Script(
        target="sapwood.cli.demo.training", module=True, args=tuple(map(str, arguments))
    )
    return launch(Plan(script=script, ranks=_RANKS, logs=stage.folder / "logs"))


def _expect_success(code: int) -> None:
    if code != 0:
        raise LaunchError(
            f"the demo's training ended with exit code {code}; `sapwood doctor` looks for causes"
        )


def next_steps(stage: Stage) -> Iterator[str]:
    """Say where to look."""
    if stage.keep:
        yield f"the run is in {stage.run}"
        yield f"    sapwood runs {stage.folder}"
        yield f"    sapwood trace {stage.run} --summary"
        yield f"    sapwood trace {stage.run} --perfetto trace.json    # open at ui.perfetto.dev"
    else:
        yield "sapwood demo --keep    keeps the run folder, for `sapwood trace RUN --perfetto ...`"
    yield "sapwood run -n 2 examples/01_plain_loop.py    is a script to start from"
    yield "sapwood doctor         checks this machine"


SCENES = (
    Scene("Train on two ranks", train),
    Scene("One step, seen from both ranks", one_step),
    Scene("Updated before backward ended", early),
    Scene("Events", events),
    Scene("Killed, and brought back", recover),
    Scene("Forked while it runs", fork),
    Scene("Where to look next", next_steps),
)


def _sparkline(values: list[float]) -> str:
    low, high = min(values), max(values)
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BARS[round((value - low) * scale)] for value in values)
