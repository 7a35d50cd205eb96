"""A few seconds of what ``make soak`` does for longer."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "soak-store"


def test_processes_that_are_killed_leave_a_repository_right() -> None:
    done = subprocess.run(
        [sys.executable, SCRIPT, "--seconds", "4"], capture_output=True, text=True, timeout=110
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "killed" in done.stdout
    assert done.stdout.endswith("nothing is wrong\n")
