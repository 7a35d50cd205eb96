"""``sapwood doctor``."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from sapwood.cli.checks import ALL, Check

__all__ = ["doctor"]

_COLOURS = {"ok": "green", "note": "yellow", "problem": "bold red"}


def doctor(
    *,
    folder: Path = Path("runs"),
    json: Annotated[bool, Parameter(negative="")] = False,
) -> int:
    """Check this machine and this installation, and say what to do about problems.

    Each line is *ok*, a *note* (it works, but you may want to know) or a *problem* (something will
    fail). The exit code is 1 when there is a problem, so a job script can ask first.

    ```
    sapwood doctor                     look at everything
    sapwood doctor --json              for a bug report or a program
    srun -n 2 sapwood doctor           what a rank of a job sees
    ```

    Args:
        folder: Where runs would be written.
        json: Write JSON instead of a table.
    """
    from sapwood.cli.output import print_json

    checks = [_safely(look, folder) for look in ALL]
    if json:
        print_json([asdict(check) for check in checks])
    else:
        _show(checks)
    return int(any(check.state == "problem" for check in checks))


def _safely(look: object, folder: Path) -> Check:
    """A check that breaks is itself a finding and must not hide the others."""
    assert callable(look)
    try:
        result = look(folder)
        assert isinstance(result, Check)
        return result
    except Exception as error:
        name = getattr(look, "__name__", "check").replace("_", " ")
        remedy = "this check could not look; please report it with `sapwood doctor --json`"
        return Check(
            name=name, state="note", found=f"{type(error).__name__}: {error}", remedy=remedy
        )


def _show(checks: list[Check]) -> None:
    from rich.text import Text

    from sapwood.cli.output import console, table

    made = table("", "what", "found")
    for check in checks:
        made.add_row(Text(check.state, style=_COLOURS[check.state]), check.name, Text(check.found))
        if check.remedy:
            made.add_row("", "", Text(f"-> {check.remedy}"))
    made.columns[2].no_wrap = False
    console().print(made)
    counts = {state: sum(check.state == state for check in checks) for state in _COLOURS}
    console().print(", ".join(f"{count} {state}" for state, count in counts.items()))
