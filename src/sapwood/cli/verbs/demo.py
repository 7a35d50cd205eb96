"""``sapwood demo``."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from sapwood.cli.values import Whole
from sapwood.errors import LaunchError

__all__ = ["demo"]


def demo(*, keep: Annotated[bool, Parameter(negative="")] = False, steps: Whole = 30) -> None:
    """Train a small model on two ranks and show what Sapwood saw.

    It starts two real processes on this machine, trains, then draws one step of both ranks, counts
    the buckets that were updated while back-propagation was still busy, and counts the events a
    subscriber received. Further scenes kill a training and go on from its checkpoint, and fork one
    while it runs. Nothing is left behind unless you ask for it.

    ```
    sapwood demo             about a minute
    sapwood demo --keep      keep the run folder, to look at it with `sapwood trace`
    ```

    Args:
        keep: Keep the run folder.
        steps: How many steps to train.
    """
    from sapwood.cli.demo.scenes import SCENES, Stage
    from sapwood.cli.output import console, width

    if steps < 2:
        raise LaunchError(f"--steps is {steps}; the demo needs at least 2 to show one of them")
    folder = Path(tempfile.mkdtemp(prefix="sapwood-demo-"))
    stage = Stage(folder, steps=steps, width=width(), keep=keep)
    out = console()
    try:
        for number, scene in enumerate(SCENES, start=1):
            out.print(f"\n{number}. {scene.title}", style="bold", markup=False)
            for line in scene.play(stage):
                out.print(line, markup=False, soft_wrap=True)
    finally:
        if not keep:
            shutil.rmtree(folder, ignore_errors=True)
