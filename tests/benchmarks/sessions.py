"""A session of a benchmark, opened and measured in a process of its own, as benchmarks do it."""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
RUN = """
import importlib, json, sys
folder, module, kind = sys.argv[1:4]
case, names, options = map(json.loads, sys.argv[4:])
sys.path.insert(0, folder)
session = getattr(importlib.import_module(module), kind)(case, names, options)
try:
    measured = {name: session.measure(name) for name in names}
    print(json.dumps([measured, vars(session.finish())]))
finally:
    session.close()
"""


def measure(
    module: str, kind: str, case: dict[str, Any], names: Sequence[str], options: dict[str, Any]
) -> tuple[dict[str, dict[str, float]], dict[str, Any]]:
    """What each contender measured, and what the session says besides; no check may have failed."""
    facts = [json.dumps(one) for one in (case, names, options)]
    command = [sys.executable, "-c", RUN, str(BENCHMARKS), f"contenders.{module}", kind, *facts]
    done = subprocess.run(command, capture_output=True, text=True, timeout=115)
    assert done.returncode == 0, done.stderr
    measured, extra = json.loads(done.stdout)
    assert extra["failed_checks"] == []
    return measured, extra
