"""The table of cases, by group; a group's cases share the processes they run in."""

from __future__ import annotations

from tests.parity.cases import late, recompute
from tests.parity.harness import Case

GROUPS: dict[str, dict[str, Case]] = {
    "late": late.CASES,
    "recompute": recompute.CASES,
}
