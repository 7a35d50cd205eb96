"""Models and loops people have, under each engine, bit for bit as plain PyTorch trains them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from sapwood.testing import ranks
from tests.parity import harness
from tests.parity.cases import GROUPS
from tests.parity.harness import Case

CASES = [
    pytest.param(group, name, id=f"{group}: {name}")
    for group, cases in GROUPS.items()
    for name in cases
]

_found: dict[tuple[str, int], Any] = {}


def run_group(group: str, world: int, folder: Path) -> list[Any]:
    """What every rank found for every case of the group; run once, by whichever test is first."""
    key = (group, world)
    if key not in _found:
        try:
            _found[key] = ranks.spawn(compare_group, world, group, timeout=110, cwd=folder)
        except Exception as error:
            _found[key] = error
    if isinstance(_found[key], Exception):
        raise AssertionError(f"the group {group!r} did not come to an end") from _found[key]
    found: list[Any] = _found[key]
    return found


def compare_group(group: str) -> dict[str, Any]:
    return harness.compare_all(GROUPS[group])


@pytest.mark.parametrize(("group", "name"), CASES)
def test_trains_as_plain_pytorch_does(group: str, name: str, tmp_path: Path) -> None:
    case = GROUPS[group][name]
    problems = []
    for world in case.worlds:
        for rank, found in enumerate(run_group(group, world, tmp_path)):
            where = f"rank {rank} of {world}"
            if name not in found:
                pytest.fail(f"{where}: an earlier case ended it: {list(found)[-1]}")
            if "reference" in found[name]:
                pytest.fail(f"{where}: plain PyTorch itself failed: {found[name]['reference']}")
            for engine in case.engines(world):
                problem = judge(case, engine, found[name][engine])
                if problem is not None:
                    problems.append(f"{engine}, {where}: {problem}")
    if problems:
        pytest.fail("\n".join(problems), pytrace=False)


def judge(case: Case, engine: str, facts: dict[str, Any]) -> str | None:
    """What is wrong with what an engine came to; None if nothing is."""
    error = facts["error"]
    if error is None:
        return f"not refused: {facts}" if engine in case.refused else difference(facts)
    text = f"{error['type']}: {error['text']}\n{error.get('trace', '')}"
    if error["type"] == "other rank":  # that rank is judged by its own error
        return None
    if engine in case.refused:
        named = error["type"] == "PeerFailed" or re.search(case.refused[engine], error["text"])
        return None if error["own"] and named else text
    told = error["own"] or (case.may_raise and re.search(case.may_raise, error["text"]))
    return None if engine in case.may_refuse and told else text


def difference(facts: dict[str, Any]) -> str | None:
    if not facts["same weights"]:
        return f"weights differ by {facts['weights']:.3g}"
    same = ("same losses", "same buffers", "same extra", "replicas")
    return ", ".join(f"{name}: {facts[name]}" for name in same if not facts[name]) or None
