"""``sapwood run``."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from sapwood.cli.script import Script
from sapwood.cli.values import Whole
from sapwood.errors import LaunchError

__all__ = ["check_ranks", "most_ranks", "run"]

_ALWAYS_ALLOWED, _PER_CORE = 64, 16


def run(
    script: str,
    /,
    *args: str,
    ranks: Annotated[Whole | None, Parameter(name=("-n", "--ranks"))] = None,
    module: Annotated[bool, Parameter(name=("-m", "--module"), negative="")] = False,
    restarts: Whole = 0,
    prefix: Annotated[bool, Parameter(negative="")] = False,
    logs: Path | None = None,
    grace: Whole | None = None,
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
    _check_counts(restarts, grace)
    if _joined(ranks):
        _refuse_in_rank({"--restarts": restarts, "--prefix": prefix, "--logs": logs}, grace)
        what.check()
        what.run()
        return 0
    from sapwood.cli.launch import Plan, launch

    count = check_ranks(ranks)
    plan = Plan(script=what, ranks=count, restarts=restarts, prefix=prefix, logs=logs, grace=grace)
    return launch(plan)


def check_ranks(ranks: int | None) -> int:
    """How many ranks to start here.

    Raises:
        LaunchError: none, or more than this machine can be meant to run.
    """
    count = 1 if ranks is None else ranks
    if count < 1:
        raise LaunchError(f"-n is {count}; a run needs at least one rank")
    if count > most_ranks():
        raise LaunchError(
            f"-n is {count}, expected at most {most_ranks()} on this machine; start ranks on "
            "several machines with srun, mpirun or torchrun"
        )
    return count


def most_ranks() -> int:
    """More would be a slip of the hand: each takes a core, and memory for torch."""
    return max(_ALWAYS_ALLOWED, _PER_CORE * len(os.sched_getaffinity(0)))


def _check_counts(restarts: int, grace: int | None) -> None:
    if restarts < 0:
        raise LaunchError(f"--restarts is {restarts}, expected 0 or more")
    if grace is not None and grace < 0:
        raise LaunchError(f"--grace is {grace}, expected seconds, 0 or more")


def _refuse_in_rank(options: dict[str, object], grace: int | None) -> None:
    """Refuse what only the launcher of the ranks could do."""
    given = [name for name, value in options.items() if value]
    given += ["--grace"] if grace is not None else []
    if given:
        raise LaunchError(
            f"{', '.join(given)} is for ranks that `sapwood run` starts itself, and another "
            "launcher has started this one; leave it away, and use that launcher's own option"
        )


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
