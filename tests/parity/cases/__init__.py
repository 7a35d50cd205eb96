"""The table of cases, by group; a group's cases share the processes they run in."""

from __future__ import annotations

from tests.parity.cases import buffers, corners, late, loops, optimizers, outputs, recompute, shapes
from tests.parity.harness import Case

GROUPS: dict[str, dict[str, Case]] = {
    "buffers": buffers.CASES,
    "corners": corners.CASES,
    "late": late.CASES,
    "loops": loops.CASES,
    "optimizers": optimizers.CASES,
    "outputs": outputs.CASES,
    "recompute": recompute.CASES,
    "shapes": shapes.CASES,
}
