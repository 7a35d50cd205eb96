"""``python -m sapwood.cli.rank [-m] TARGET ...``: the first thing a rank of ``sapwood run`` does.

It ties the rank's life to the launcher's, then runs the script. When the script fails it leaves the
traceback in the file the launcher reads (torch's error file, and plain text beside it). When the
script ended because the job's time is over, it asks the launcher to end too.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import traceback
from contextlib import suppress
from pathlib import Path

from sapwood.cli.process import die_with_parent
from sapwood.cli.script import Script
from sapwood.runtime.notes import LaunchNote
from sapwood.runtime.stopped import Stopped

__all__ = ["LAUNCHER", "TRACEBACK", "main"]

LAUNCHER = "SAPWOOD_LAUNCHER_PID"
TRACEBACK = "traceback.txt"


def main() -> None:
    """Run the script of the command line as one rank."""
    launcher = int(os.environ.pop(LAUNCHER))
    die_with_parent(launcher)
    # What an earlier attempt noted holds no more.
    LaunchNote(int(os.environ["RANK"])).write()
    Script.parse(sys.argv[1:]).run(on_failure=lambda error: _failed(error, launcher))


def _failed(error: BaseException, launcher: int) -> None:
    if not isinstance(error, Stopped):
        _leave_report(error)
    elif error.final and os.getppid() == launcher:
        # Only now, as the script may have caught it and gone on. Before this rank ends, or the
        # launcher would spend a restart that could do nothing but stop again.
        os.kill(launcher, signal.SIGTERM)


def _leave_report(error: BaseException) -> None:
    place = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not place:
        return
    text = "".join(traceback.format_exception(error))
    summary = f"{type(error).__name__}: {error}"
    details = {"py_callstack": text, "timestamp": str(int(time.time()))}
    report = {
        "message": {"message": summary, "extraInfo": details},
        "error_type": type(error).__name__,
        "time_ns": time.time_ns(),
    }
    # A full disk must not hide the error that brought us here.
    with suppress(OSError):
        Path(place).write_text(json.dumps(report))
        if not isinstance(error, SystemExit):  # the script ended itself, and nothing is printed
            Path(place).with_name(TRACEBACK).write_text(text)


if __name__ == "__main__":
    main()
