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

CELLS = [
    pytest.param(group, name, world, engine, id=f"{group}: {name}-{world}-{engine}")
    for group, cases in GROUPS.items()
    for name, case in cases.items()
    for world in case.worlds
    for engine in case.engines(world)
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


@pytest.mark.parametrize(("group", "name", "world", "engine"), CELLS)
def test_trains_as_plain_pytorch_does(
    group: str, name: str, world: int, engine: str, tmp_path: Path
) -> None:
    case = GROUPS[group][name]
    for rank, found in enumerate(run_group(group, world, tmp_path)):
        if name not in found:
            pytest.fail(f"an earlier case ended rank {rank}: {list(found)[-1]}")
        if "reference" in found[name]:
            pytest.fail(f"plain PyTorch itself failed:\n{found[name]['reference']}")
        check(case, engine, rank, found[name][engine])


def check(case: Case, engine: str, rank: int, facts: dict[str, Any]) -> None:
    error = facts["error"]
    if engine in case.refused:
        assert error is not None, f"rank {rank}: not refused, and went on with {facts}"
        assert error.get("own") or error["type"] == "other rank", error
        if error["type"] != "PeerFailed":
            assert re.search(case.refused[engine], error["text"]), error
        return
    if error is not None:
        if engine in case.may_refuse and error.get("own"):
            return
        pytest.fail(f"rank {rank}: {error['type']}: {error['text']}\n{error.get('trace', '')}")
    assert facts["same weights"], f"rank {rank}: weights differ by {facts['weights']:.3g}"
    assert facts["same losses"], f"rank {rank}: losses differ"
    assert facts["same buffers"], f"rank {rank}: buffers differ"
    assert facts["same extra"], f"rank {rank}: what was kept beside the model differs"
    assert facts["replicas"], f"rank {rank}: the replicas differ"
