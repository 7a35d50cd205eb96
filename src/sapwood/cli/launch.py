"""Starting ranks on this machine with torch's own elastic launcher, and ending all of them."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import sys
import tempfile
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from sapwood.cli import process
from sapwood.cli.failures import SentSignals, report
from sapwood.cli.limit import Limit
from sapwood.cli.rank import LAUNCHER
from sapwood.cli.script import Script
from sapwood.errors import LaunchError
from sapwood.runtime.notes import NOTES, read_notes
from sapwood.runtime.stopped import EXIT_CODE

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing import LogsSpecs
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
    from torch.distributed.launcher.api import LaunchConfig

__all__ = ["KEEP_FREED_MEMORY", "Plan", "launch"]

KEEP_FREED_MEMORY = {
    "MALLOC_TRIM_THRESHOLD_": str(512 * 2**20),
    # The largest that every glibc accepts. Setting one alone would fix the other at 128 KB.
    "MALLOC_MMAP_THRESHOLD_": str(32 * 2**20),
}
"""Else glibc gives activations and gradients back to the system when they are freed, and the next
step faults in every page again: up to 14,000 faults, 15 ms, in a step of a ResNet-50."""

_LEFTOVER_GRACE = 2.0
_ASKS = (signal.SIGTERM, signal.SIGUSR1)
"""A run saves before it ends by these."""
_STOP = (*_ASKS, signal.SIGINT, signal.SIGHUP)
# torch kills ranks after a time that is fixed when they start; ours depends on what they say.
_TORCH_NEVER = 10**6
_SAME = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What to start, and how."""

    script: Script
    ranks: int = 1
    restarts: int = 0
    prefix: bool = False
    """Put ``[rank]`` before each line the ranks write."""
    logs: Path | None = None
    """Keep what each rank writes in files below this folder."""
    grace: int | None = None
    """Seconds between asking the ranks to end and killing them; None: as long as they need."""


def launch(plan: Plan) -> int:
    """Run the ranks to their end and return the exit code of the first that failed, or 0."""
    plan.script.check()
    process.adopt_orphans()
    folder = _working_folder(plan.logs)
    os.environ[NOTES] = str(folder / "notes")
    limit = Limit(folder / "notes", plan.grace)
    leave = _Leaving(limit)
    before = {number: signal.signal(number, leave) for number in _STOP}
    keep = plan.logs is not None
    try:
        with SentSignals() as sent:
            failures = _run_ranks(plan, folder, leave)
        # torch ends the others when the first leaves, some of them just before they would.
        codes = {failure.exitcode for failure in failures.values() if not sent.ended(failure)}
        if codes == {EXIT_CODE} and (stopped := _how_stopped(folder / "notes")):
            return _say(stopped)
        if not failures:
            return 0
        code, traceback = report(failures, sent)
        keep = keep or traceback is not None  # the message names that file
        return code
    except _StopError as ended:
        if stopped := _how_stopped(folder / "notes"):
            return _say(stopped)
        print(f"sapwood: {ended}; the ranks are ended too", file=sys.stderr)
        return ended.code
    finally:
        # What follows is bounded in time; a second signal must not leave ranks behind.
        for number in _STOP:
            signal.signal(number, signal.SIG_IGN)
        limit.close()
        del os.environ[NOTES]
        process.end_descendants(_LEFTOVER_GRACE)
        if not keep:
            shutil.rmtree(folder, ignore_errors=True)
        for number, handler in before.items():
            signal.signal(number, handler)


class _StopError(Exception):
    """A signal asked the launcher to end."""

    def __init__(self, number: int) -> None:
        super().__init__(f"ended by {signal.Signals(number).name}")
        self.code = 128 + number


class _Leaving:
    """The signal handler of the launcher: it has the ranks end, and sees that they do."""

    def __init__(self, limit: Limit) -> None:
        self._limit = limit
        self._first: dict[int, float] = {}
        self.error: Callable[[int], Exception] = _StopError
        """What to raise; torch's own exception once its launcher runs."""

    def __call__(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        # A batch system and a parent that passes signals on may both say the same.
        if 0.0 < now - self._first.setdefault(number, now) < _SAME:
            return
        self._limit.begin(patient=number in _ASKS)
        raise self.error(number)


def _working_folder(logs: Path | None) -> Path:
    """A new folder for notes, tracebacks and logs of the ranks, below ``logs`` if it is given."""
    try:
        if logs is not None:
            logs.mkdir(parents=True, exist_ok=True)
        return Path(tempfile.mkdtemp(prefix="sapwood-run-", dir=logs))
    except OSError as error:
        why = error.strerror or str(error)
        if logs is not None:
            raise LaunchError(
                f"--logs {logs}: cannot make a folder there: {why}; give a folder you may write to"
            ) from error
        raise LaunchError(
            f"cannot make a temporary folder: {why}; set TMPDIR to a folder you may write to"
        ) from error


def _run_ranks(plan: Plan, folder: Path, leave: _Leaving) -> dict[int, ProcessFailure]:
    """Wait for the ranks; what is returned are the failures that ended them."""
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import elastic_launch

    _hush_torch()
    _share_cores(plan.ranks)
    if not KEEP_FREED_MEMORY.keys() & os.environ.keys():
        os.environ.update(KEEP_FREED_MEMORY)
    os.environ[LAUNCHER] = str(os.getpid())
    # Lines of the ranks pass through our standard output and must not wait in its buffer.
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    command = ("-m", "sapwood.cli.rank", *plan.script.tokens())
    # torch passes the signal on to the ranks, waits for them, and restarts none.
    leave.error = lambda number: SignalException("ended", sigval=signal.Signals(number))
    try:
        elastic_launch(_config(plan, folder), sys.executable)(*command)
    except ChildFailedError as error:
        return dict(error.failures)
    except SignalException as error:
        raise _StopError(error.sigval) from None
    finally:
        leave.error = _StopError
    return {}


def _config(plan: Plan, folder: Path) -> LaunchConfig:
    from torch.distributed.launcher.api import LaunchConfig

    from sapwood.cli import meeting

    meeting.register()
    return LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=plan.ranks,
        run_id=uuid.uuid4().hex[:12],
        rdzv_backend=meeting.BACKEND,
        max_restarts=plan.restarts,
        monitor_interval=0.1,
        log_line_prefix_template="[${rank}] " if plan.prefix else None,
        logs_specs=_logs(plan, folder),
        shutdown_timeout=_TORCH_NEVER,
        # The others keep the handlers they have, which are ours.
        signals_to_handle="SIGQUIT",
    )


def _logs(plan: Plan, folder: Path) -> LogsSpecs:
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std

    through_files = plan.prefix or plan.logs is not None
    return DefaultLogsSpecs(log_dir=str(folder), tee=Std.ALL if through_files else Std.NONE)


def _hush_torch() -> None:
    """Our one line about a failure replaces torch's banner, unless someone asked for its log."""
    if "LOGLEVEL" not in os.environ and not os.environ.get("SAPWOOD_DEBUG"):
        for name in list(logging.root.manager.loggerDict):
            if name.startswith("torch.distributed.elastic"):
                logging.getLogger(name).setLevel(logging.CRITICAL)


def _share_cores(ranks: int) -> None:
    """Without this every rank would start a thread per core, and they would fight."""
    cores = len(os.sched_getaffinity(0))
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores // ranks)))


def _how_stopped(notes: Path) -> str:
    """What the ranks say of a stop they were asked for; nothing if there was none."""
    found = [note for note in read_notes(notes) if "stopped" in note]
    if not found:
        return ""
    saved = "saved" if all(note["saved"] for note in found) else "not saved"
    over = any(note.get("final") for note in found)
    again = "it is not restarted inside this job; start the job again" if over else "start it again"
    how = f"stopped after step {found[0]['stopped']} ({saved}): {found[0]['reason']}"
    return f"{how}; {again} to go on"


def _say(stopped: str) -> int:
    print(f"sapwood: {stopped}", file=sys.stderr)
    return EXIT_CODE
