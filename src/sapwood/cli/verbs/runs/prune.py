"""``sapwood runs prune``."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from sapwood.cli.folders import RunInfo, list_runs, read_run
from sapwood.cli.values import Whole
from sapwood.cli.words import age, size
from sapwood.errors import ConfigError
from sapwood.runtime.durations import parse_seconds

__all__ = ["prune"]

_Flag = Annotated[bool, Parameter(negative="")]
_State = Literal["ended", "stopped", "interrupted", "failed", "died", "damaged"]
# One that was stopped is to go on, and nobody knows what a damaged one is: by name only.
_USUALLY = ("ended", "interrupted", "failed", "died")
# What a run writes about itself; engines of checkpoints leave their logs beside it.
_RECORDS = ("run.toml", "status.json", "address", "token", "trace")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Going:
    """A run that may go."""

    run: RunInfo
    nbytes: int
    beside: dict[str, int]
    """What is in its folder beside its records, such as checkpoints, and how large that is."""


def prune(
    folder: Path = Path("runs"),
    /,
    *,
    last: Whole | None = None,
    older: str | None = None,
    state: Annotated[tuple[_State, ...], Parameter(negative="")] = (),
    everything: _Flag = False,
    yes: _Flag = False,
) -> int:
    """Remove the folders of old runs: what they say about themselves, and their traces.

    Shows what would go and asks first; without a terminal to ask on, it only shows. A run that is
    running never goes. A folder that holds more than the run's own records, such as checkpoints,
    stays unless you say `--everything`. Checkpoints elsewhere are not touched:
    `sapwood ckpt prune` looks after these.

    ```
    sapwood runs prune --last 20                  keep the newest 20
    sapwood runs prune --older 30d                keep those of the last 30 days
    sapwood runs prune --state failed --state died    only runs that ended so
    sapwood runs prune /data/runs --older 7d --yes    do not ask
    ```

    Args:
        folder: The folder that holds the run folders.
        last: Keep the newest N, whatever they are.
        older: Only runs that began so long ago, such as 12h or 30d.
        state: Only runs that ended so; may be given several times. By default ended, interrupted,
            failed and died: a stopped run is to go on.
        everything: Also folders that hold checkpoints or other files.
        yes: Do not ask.
    """
    going = _choose(list_runs(folder), last, older, state)
    held = [one for one in going if one.beside and not everything]
    going = [one for one in going if one not in held]
    for one in held:
        print(f"{one.run.id} stays: it holds {_inside(one)}; --everything removes it, too")
    if not going:
        print("no runs to remove")
        return 0
    for one in going:
        print(_line(one))
    if not _agreed(going, yes=yes):
        print("nothing was removed" + ("" if sys.stdin.isatty() else "; add --yes to do it"))
        return 0
    return _remove(going, everything=everything)


def _choose(
    found: Sequence[RunInfo], last: int | None, older: str | None, state: tuple[str, ...]
) -> list[_Going]:
    if last is None and older is None and not state:
        raise ConfigError("say which runs may go: --last N, --older 30d or --state failed")
    if last is not None and last < 0:
        raise ConfigError(f"--last is {last}, expected 0 or more")
    least = None if older is None else parse_seconds(older, "--older")
    kept = {run.id for run in found[max(0, len(found) - last) :]} if last is not None else set()
    return [
        _looked_at(run)
        for run in found
        if run.id not in kept
        and run.state in (state or _USUALLY)
        and (least is None or (_seconds(run) or 0.0) >= least)
    ]


def _seconds(run: RunInfo) -> float | None:
    return None if run.created is None else (datetime.now(UTC) - run.created).total_seconds()


def _looked_at(run: RunInfo) -> _Going:
    sizes = {path.name: _size(path) for path in run.folder.iterdir()}
    beside = {name: nbytes for name, nbytes in sizes.items() if not _is_record(name)}
    return _Going(run=run, nbytes=sum(sizes.values()), beside=beside)


def _is_record(name: str) -> bool:
    return name in _RECORDS or (name.startswith("engine-") and name.endswith(".log"))


def _size(path: Path) -> int:
    """Bytes of a file, or of all files below a folder; links are not followed."""
    found = [path]
    if path.is_dir() and not path.is_symlink():
        found += [Path(place) / name for place, _, names in os.walk(path) for name in names]
    total = 0
    for one in found:
        with suppress(FileNotFoundError):  # somebody else clears up, too
            total += one.lstat().st_size
    return total


def _line(one: _Going) -> str:
    text = f"{one.run.id} ({one.run.state}, {age(_seconds(one.run))} old, {size(one.nbytes)})"
    return f"{text}, with {_inside(one)}" if one.beside else text


def _inside(one: _Going) -> str:
    return ", ".join(f"{name} ({size(nbytes)})" for name, nbytes in sorted(one.beside.items()))


def _agreed(going: Sequence[_Going], *, yes: bool) -> bool:
    if yes or not sys.stdin.isatty():
        return yes
    total = size(sum(one.nbytes for one in going))
    try:
        answer = input(f"remove these {len(going)} runs ({total})? [y/N] ")
    except EOFError:
        return False
    return answer.strip().lower() in ("y", "yes")


def _remove(going: Sequence[_Going], *, everything: bool) -> int:
    """Remove each, unless it has changed while somebody thought about it."""
    failed = []
    for one in going:
        folder = one.run.folder
        try:
            if folder.is_symlink():
                failed.append(f"{one.run.id} is a link to {folder.resolve()}; remove that yourself")
            elif read_run(folder).state != one.run.state:
                failed.append(f"{one.run.id} is {read_run(folder).state} now, and stays")
            elif not everything and _looked_at(one.run).beside:
                failed.append(f"{one.run.id} holds more than it did, and stays")
            else:
                shutil.rmtree(folder)
        except OSError as error:
            failed.append(f"{one.run.id} cannot be removed: {error.strerror or error}")
    for sentence in failed:
        print(sentence, file=sys.stderr)
    print(f"{len(going) - len(failed)} runs removed")
    return int(bool(failed))
