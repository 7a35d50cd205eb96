"""``sapwood runs``: the table."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from sapwood.cli.folders import RunInfo, as_tree, list_runs

__all__ = ["show"]

_COLOURS = {"running": "green", "failed": "red", "died": "red"}
_COLOURS |= dict.fromkeys(("stopped", "interrupted", "damaged"), "yellow")


def show(
    folder: Path = Path("runs"),
    /,
    *,
    as_json: Annotated[bool, Parameter(name="--json", negative="")] = False,
) -> None:
    """List the runs of a folder, each below the run it was forked from.

    A run is *running*, *ended*, *stopped* (it was asked to, by a signal or its time limit, and
    says what it saved), *interrupted* (by Ctrl-C), *failed* (it said so itself), *died* (it says
    running, but its process is gone from this machine) or *damaged* (its folder cannot be read; the
    reason follows). The last column has what was changed in a fork, and why a run ended.

    ```
    sapwood runs                 the runs under runs/
    sapwood runs /data/runs      those of another folder
    sapwood runs --json          the same for a program
    sapwood runs prune --last 20     remove older ones, after a question
    ```

    Args:
        folder: The folder that holds the run folders.
        as_json: Write JSON instead of a table.
    """
    from sapwood.cli.output import print_json

    found = list_runs(folder)
    if as_json:
        print_json([_plain(run) for run in found])
    else:
        _show(found, folder)


def _show(found: list[RunInfo], folder: Path) -> None:
    from rich.text import Text

    from sapwood.cli.output import console, print_with_messages, table

    if not found:
        console().print(f"no runs in {folder} yet", markup=False)
        return
    columns = ("run", "state", "ranks", "step", "started", "age", "parent", "")
    made = table(*columns, right=("ranks", "step", "age"))
    for depth, run in as_tree(found):
        made.add_row(
            Text("  " * (depth - 1) + "└ " * (depth > 0) + run.id),
            Text(run.state, style=_COLOURS.get(run.state, "")),
            _text(run.ranks),
            _text(run.step),
            run.created.astimezone().strftime("%Y-%m-%d %H:%M") if run.created else "-",
            _age(run.created),
            Text(_parent(run)),
            Text(_message(run)),
        )
    print_with_messages(made)


def _text(number: int | None) -> str:
    return "-" if number is None else str(number)


def _parent(run: RunInfo) -> str:
    if run.parent is None:
        return ""
    return run.parent if run.parent_step is None else f"{run.parent} @ {run.parent_step}"


def _message(run: RunInfo) -> str:
    """What was changed, which is short and tells forks apart, and then why it ended."""
    changes = " ".join(f"{path}={json.dumps(value)}" for path, value in run.overrides.items())
    return "; ".join(filter(None, [changes, " ".join((run.detail or "").split())]))


def _age(created: datetime | None) -> str:
    if created is None:
        return "-"
    seconds = max(0, int((datetime.now(UTC) - created).total_seconds()))
    for unit, length in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= 2 * length:
            return f"{seconds // length}{unit}"
    return f"{seconds}s"


def _plain(run: RunInfo) -> dict[str, Any]:
    return {
        "id": run.id,
        "folder": str(run.folder),
        "state": run.state,
        "detail": run.detail,
        "ranks": run.ranks,
        "step": run.step,
        "created": run.created.isoformat() if run.created else None,
        "parent": run.parent,
        "parent_step": run.parent_step,
        "overrides": dict(run.overrides),
        "host": run.host,
        "averaging": run.averaging,
        "averaging_reason": run.averaging_reason,
        "buckets": run.buckets,
    }
