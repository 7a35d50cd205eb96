"""What a run folder says about its run, read with patience: a damaged one is listed, not fatal."""

from __future__ import annotations

import json
import platform
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from sapwood.errors import RunFolderError
from sapwood.regular import read_regular
from sapwood.runtime.folder import process_start

__all__ = [
    "CLONES",
    "LATEST",
    "STATES",
    "TRACE",
    "Need",
    "RunInfo",
    "as_tree",
    "find_run",
    "list_runs",
    "read_run",
]

LATEST = "latest"
"""In place of an id: the run that began last."""
STATES = ("running", "ended", "stopped", "interrupted", "failed", "died", "damaged")
_WRITTEN = ("running", "ended", "stopped", "interrupted", "failed")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunInfo:
    """One run as far as its folder tells."""

    id: str
    folder: Path
    state: str
    """running, ended, stopped (when asked to), interrupted (by Ctrl-C), failed, died (its process
    is gone), or damaged."""
    detail: str | None = None
    """The error of a failed run, who stopped one, or what is wrong with a damaged folder."""
    ranks: int | None = None
    step: int | None = None
    created: datetime | None = None
    parent: str | None = None
    parent_step: int | None = None
    overrides: Mapping[str, Any] = field(default_factory=dict)
    """What was changed when it was forked."""
    host: str | None = None
    averaging: str | None = None
    """How gradients are averaged, and why; None for runs of older versions."""
    averaging_reason: str | None = None
    buckets: str | None = None
    """What was measured in the first steps, and chosen; None where nothing was."""


def list_runs(root: Path) -> list[RunInfo]:
    """Every run below ``root``, oldest first; folders that are not runs are passed over.

    Raises:
        RunFolderError: ``root`` is not a folder.
    """
    if not root.is_dir():
        raise RunFolderError(
            f"there is no folder {root} here; give the folder the runs are in "
            "(a run makes runs/ unless told otherwise)"
        )
    marks = ("run.toml", "status.json")
    folders = [p for p in root.iterdir() if p.is_dir() and any((p / m).exists() for m in marks)]
    return sorted(map(read_run, folders), key=_age_key)


@dataclass(frozen=True, slots=True)
class Need:
    """What a run must have for a verb that is told "latest"."""

    met: Callable[[RunInfo], bool]
    lacking: str
    """Said of a folder of runs where none has it."""


CLONES = Need(
    lambda run: run.state == "running" and (run.folder / "address").exists(),
    "can be forked now; it must be running, and have called run.allow_clones()",
)
TRACE = Need(
    lambda run: any((run.folder / "trace").glob("rank-*.jsonl")),
    "has a trace; make it with Run(trace=True), or set SAPWOOD_RUN_TRACE=1",
)


def find_run(name: str, root: Path, *, need: Need | None = None) -> Path:
    """The folder of a run given by its path, its id, a beginning of the id, or "latest".

    ``need``: only of runs that have it is the latest meant.

    Raises:
        RunFolderError: No run fits, or several do.
    """
    if not name:  # as of a shell variable that is not set; every id begins with it
        raise RunFolderError(f"no run is named; give its folder, an id, or {LATEST!r}")
    for place in (Path(name), root / name):
        if (place / "run.toml").exists() or (place / "trace").is_dir():
            return place
    if name == LATEST:
        return _latest(root, need)
    fitting = [run for run in list_runs(root) if run.id.startswith(name)] if root.is_dir() else []
    if len(fitting) == 1:
        return fitting[0].folder
    if fitting:
        ids = ", ".join(run.id for run in fitting)
        raise RunFolderError(f"{name!r} is the beginning of several runs: {ids}; give more of it")
    raise RunFolderError(
        f"no run {name!r}: it is neither a run folder nor an id under {root}; "
        "`sapwood runs` lists what there is"
    )


def _latest(root: Path, need: Need | None) -> Path:
    found = [run for run in list_runs(root) if need is None or need.met(run)]
    if not found:
        raise RunFolderError(f"no run in {root} {need.lacking if need else 'yet'}")
    return max(found, key=_latest_key).folder


def _latest_key(run: RunInfo) -> tuple[datetime, float]:
    # Runs note the second in which they began; a population begins several in one.
    changed = max((path.stat().st_mtime for path in run.folder.glob("run.toml")), default=0.0)
    return (_age_key(run)[0], changed)


def read_run(folder: Path) -> RunInfo:
    """Read one run folder; whatever is wrong with it becomes the state "damaged"."""
    try:
        facts = tomllib.loads(read_regular(folder / "run.toml").decode())
        status = json.loads(read_regular(folder / "status.json"))
        return _interpret(folder, facts, status)
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        return RunInfo(id=folder.name, folder=folder, state="damaged", detail=_why(error))


def as_tree(runs: Sequence[RunInfo]) -> list[tuple[int, RunInfo]]:
    """Runs with their depth, each below the run it was forked from."""
    known = {run.id for run in runs}
    children: dict[str | None, list[RunInfo]] = {}
    for run in runs:
        parent = run.parent if run.parent in known and run.parent != run.id else None
        children.setdefault(parent, []).append(run)
    tree: list[tuple[int, RunInfo]] = []
    todo = [(0, run) for run in reversed(children.pop(None, []))]
    while todo:
        depth, run = todo.pop()
        tree.append((depth, run))
        todo.extend((depth + 1, child) for child in reversed(children.pop(run.id, [])))
    # Folders edited by hand can name each other as parents; they must still be listed.
    return tree + [(0, run) for group in children.values() for run in group]


def _interpret(folder: Path, facts: dict[str, Any], status: dict[str, Any]) -> RunInfo:
    host: dict[str, Any] = facts.get("host", {})
    state = str(status["state"])
    if state not in _WRITTEN:
        raise ValueError(f"status.json says state {state!r}")
    if state == "running" and _is_gone(host):
        state = "died"
    layout: dict[str, Any] = facts.get("layout", {})
    detail = status.get("error", status.get("detail"))
    parent_step = facts.get("parent_step")
    return RunInfo(
        id=str(facts["id"]),
        folder=folder,
        state=state,
        detail=_maybe(detail),
        ranks=int(facts["world"]),
        step=int(status["step"]),
        created=_time(facts["created"]),
        parent=str(facts["parent"]) if facts.get("parent") else None,
        parent_step=None if parent_step is None else int(parent_step),
        overrides={path: _value(text) for path, text in facts.get("overrides", {}).items()},
        host=str(host["name"]) if "name" in host else None,
        averaging=_maybe(layout.get("averaging")),
        averaging_reason=_maybe(layout.get("averaging_reason")),
        buckets=_maybe(status.get("buckets")),
    )


def _value(text: object) -> Any:
    """A changed value; run.toml has it as JSON, which can say more than TOML."""
    try:
        return json.loads(str(text))
    except ValueError:
        return text


def _maybe(value: object) -> str | None:
    return None if value is None else str(value)


def _is_gone(host: dict[str, Any]) -> bool:
    """Whether the process of rank 0 ended; unknown, so no, when it is on another host."""
    if host.get("name") != platform.node() or not isinstance(host.get("pid"), int):
        return False
    began, started = process_start(host["pid"]), host.get("started")
    # A process id is given out again some day; with its start time it is unique on a host.
    return began is None or (bool(started) and began != started)


def _time(value: object) -> datetime:
    moment = value if isinstance(value, datetime) else datetime.fromisoformat(str(value))
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)


def _why(error: Exception) -> str:
    if isinstance(error, FileNotFoundError):
        return f"{Path(error.filename).name} is missing"
    if isinstance(error, KeyError):
        return f"no key {error.args[0]!r}"
    return " ".join(str(error).split())


def _age_key(run: RunInfo) -> tuple[datetime, str]:
    return (run.created or datetime.min.replace(tzinfo=UTC), run.id)
