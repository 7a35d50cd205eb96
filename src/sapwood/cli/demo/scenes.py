"""What the demo shows, as a list of small scenes; a new system adds a scene of its own."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from sapwood.cli.launch import Plan, launch
from sapwood.cli.script import Script
from sapwood.errors import LaunchError
from sapwood.trace.read import Trace, read_trace
from sapwood.trace.steps import late_step
from sapwood.trace.summary import early_updates
from sapwood.trace.timeline import timeline_text

__all__ = ["SCENES", "Scene", "Stage"]

_BARS = "▁▂▃▄▅▆▇█"
_RANKS = 2


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
    arguments = ("--folder", stage.folder, "--result", stage.result, "--steps", stage.steps)
    script = Script(
        target="sapwood.cli.demo.training", module=True, args=tuple(map(str, arguments))
    )
    code = launch(Plan(script=script, ranks=_RANKS))
    if code != 0:
        raise LaunchError(
            f"the demo's training ended with exit code {code}; `sapwood doctor` looks for causes"
        )
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
    yield "checkpoints and forks of a running training will start from these events"


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
    Scene("Where to look next", next_steps),
)


def _sparkline(values: list[float]) -> str:
    low, high = min(values), max(values)
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BARS[round((value - low) * scale)] for value in values)
