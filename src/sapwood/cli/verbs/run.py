"""``sapwood run``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from sapwood.cli.script import Script
from sapwood.errors import LaunchError

__all__ = ["protect_script", "run"]

VALUED = ("-n", "--ranks", "--restarts", "--logs", "--grace")
"""Options that take a value: `protect_script` must know them to find the script."""

_Word = Annotated[str, Parameter(allow_leading_hyphen=True)]


def run(
    script: _Word,
    /,
    *args: _Word,
    ranks: Annotated[int | None, Parameter(name=("-n", "--ranks"))] = None,
    module: Annotated[bool, Parameter(name=("-m", "--module"), negative="")] = False,
    restarts: int = 0,
    prefix: Annotated[bool, Parameter(negative="")] = False,
    logs: Path | None = None,
    grace: int | None = None,
) -> int:
    """Start the ranks of a script on this machine, or join those of another launcher.

    On its own it starts `-n` ranks with torch's elastic launcher, waits for them, and ends every
    process they started, also when it is interrupted or killed. The exit code is that of the first
    rank that failed. SIGTERM or SIGUSR1 ask a run to stop: it ends its step on all ranks, saves,
    and the exit code is 75, "start me again". If a rank gets the signal, `--restarts` starts all
    ranks again. If `sapwood run` gets it, or a time limit was reached, nothing is restarted and the
    exit code is 75.

    Started by torchrun, srun or mpirun it runs the script in its own process, as the rank that
    launcher made it. Everything after the script belongs to the script.

    ```
    sapwood run -n 2 train.py --lr 0.1        two ranks on this machine
    sapwood run -n 2 -m mypackage.train       a module instead of a file
    sapwood run -n 4 --prefix train.py        each line shows which rank wrote it
    sapwood run -n 2 --logs logs train.py     also keep what each rank writes
    sapwood run -n 2 --restarts 3 train.py    start all ranks again when one fails or stops
    srun -N 2 -n 8 sapwood run train.py       a cluster: srun starts the ranks
    mpirun -n 4 sapwood run train.py
    ```

    Args:
        script: Path of a Python file, or with -m the name of a module.
        args: Arguments of the script.
        ranks: How many ranks to start (one if not given).
        module: Run a module, as `python -m` does.
        restarts: How often to start all ranks again after one failed, or a signal to a rank stopped
            them.
        prefix: Put the rank before each line the ranks write.
        logs: Keep what each rank writes in files below this folder.
        grace: Seconds between asking ranks to end and killing them (10 if not given, and more for
            a run that saves first: twice its stop_timeout, for the step and for saving).
    """
    what = Script(target=script, args=args, module=module)
    if _joined(ranks):
        what.check()
        what.run()
        return 0
    from sapwood.cli.launch import Plan, launch

    count = 1 if ranks is None else ranks
    if count < 1:
        raise LaunchError(f"-n is {count}; a run needs at least one rank")
    plan = Plan(script=what, ranks=count, restarts=restarts, prefix=prefix, logs=logs, grace=grace)
    return launch(plan)


def protect_script(tokens: list[str]) -> list[str]:
    """Put ``--`` before the script, so that its own options are not taken for ours."""
    index = 1
    while index < len(tokens):
        word = tokens[index]
        if word == "--" or not word.startswith("-"):
            break
        index += 2 if word in VALUED else 1
    if index >= len(tokens) or tokens[index] == "--":
        return tokens
    return [*tokens[:index], "--", *tokens[index:]]


def _joined(ranks: int | None) -> bool:
    """Whether another launcher made this process a rank already."""
    from sapwood.runtime.launch import detect

    place = detect()
    if place.launcher == "none":
        return False
    if ranks is not None and ranks != place.world:
        raise LaunchError(
            f"-n is {ranks}, but {place.launcher} already started this process as rank "
            f"{place.rank} of {place.world}; leave -n away, or start it outside {place.launcher}"
        )
    return True
