"""``sapwood fork``."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from sapwood.errors import ConfigError

if TYPE_CHECKING:
    from sapwood.clone.door import Address

__all__ = ["fork"]

_Word = Annotated[str, Parameter(allow_leading_hyphen=True)]
_PYTHONS = ("python", "python3", "sapwood")


def fork(
    run: str,
    /,
    *command: _Word,
    ranks: Annotated[int | None, Parameter(name=("-n", "--ranks"))] = None,
    changes: Annotated[tuple[str, ...], Parameter(name="--set", negative="")] = (),
    vary: Annotated[tuple[str, ...], Parameter(name="--vary", negative="")] = (),
    approach: str = "",
    transport: str = "",
    standby: Annotated[bool, Parameter(negative="")] = False,
    go: Annotated[bool, Parameter(negative="")] = False,
    folder: Path = Path("runs"),
) -> int:
    """Fork a running training: the same script goes on from its state, on ranks of its own.

    The running job is not stopped: during one back-propagation it sends its weights, its
    optimizer's state and all else that belongs to it, and goes on. It must have called
    `run.allow_clones()`. The script is the same; `Run` sees that it was started by a fork, and
    `run.forked_from` says of what. With -n the new ranks are started here; under torchrun, srun or
    mpirun each process is the rank that launcher made it.

    ```
    sapwood fork 20261116 -n 2 -- train.py                       the same again, beside it
    sapwood fork 20261116 --set optimizer.lr=0.01 -- train.py    with another learning rate
    sapwood fork 20261116 --vary optimizer.lr=[0.1,0.01] -- train.py     two forks
    sapwood fork 20261116 --standby -n 2 -- train.py             ready to begin, and waiting
    sapwood fork 20261116 --go                                   now
    srun -n 8 sapwood fork /shared/runs/20261116-0042-3f9a1c -- train.py
    ```

    Args:
        run: A run's folder, its id, or a beginning of the id.
        command: The script and its arguments, as for `sapwood run`.
        ranks: How many ranks to start (one if not given).
        changes: PATH=VALUE: what shall be different. `optimizer.*` is changed in the optimizer; the
            script asks for the rest with `run.override(path, default)`.
        vary: PATH=[A,B,...]: one fork for each value, all at once; several make all combinations.
        approach: deepclone, lazy, p2p or file; by default what the run is set to.
        transport: auto, gloo, memory, mpi, mooncake or nccl; by default what the run is set to.
        standby: Start the ranks and get ready, but wait until the run, or --go, says so.
        go: Let clones that stand by begin; needs no script.
        folder: The folder that holds the run folders.
    """
    from sapwood.cli.folders import find_run
    from sapwood.clone.door import Address
    from sapwood.clone.order import ENV, ForkOrder, parse_overrides

    if go:
        return _go(Address.read(find_run(run, folder)))
    words = _script(command)
    overrides = parse_overrides(changes)
    if vary:
        return _several(run, words, ranks, overrides, vary, approach, transport, folder)
    from sapwood.cli.verbs.run import run as start

    address = Address.read(find_run(run, folder))
    address.token()  # whoever cannot read it need not start
    order = ForkOrder(address=address, overrides=overrides, approach=approach, transport=transport)
    os.environ[ENV] = order.encode()
    try:
        if words[0] == "-m":
            return start(*words[1:], ranks=ranks, module=True)
        return start(*words, ranks=ranks)
    finally:
        del os.environ[ENV]


def _go(address: Address) -> int:
    from sapwood.cli.output import console
    from sapwood.clone.door import ask

    count = ask(address, {"op": "go"})["started"]
    console().print(f"{count} groups that stood by begin" if count else "nobody stands by")
    return 0


def _script(command: tuple[str, ...]) -> list[str]:
    words = list(command)
    if words[:1] and Path(words[0]).name in _PYTHONS:
        words = words[1:]
        if words[:1] == ["run"]:
            words = words[1:]
    if not words:
        raise ConfigError("there is no script to fork; put it behind --, as in -- train.py")
    return words


def _several(
    run: str,
    words: list[str],
    ranks: int | None,
    overrides: dict[str, Any],
    vary: tuple[str, ...],
    approach: str,
    transport: str,
    folder: Path,
) -> int:
    """Start a fork for each combination, and wait for all; the exit code of the first to fail."""
    base = [sys.executable, "-m", "sapwood.cli", "fork", run, "--folder", str(folder)]
    if ranks is not None:
        base += ["-n", str(ranks)]
    if approach:
        base += ["--approach", approach]
    if transport:
        base += ["--transport", transport]
    started = []
    try:
        for values in _combinations(vary):
            chosen = {**overrides, **values}
            sets = [w for k, v in chosen.items() for w in ("--set", f"{k}={json.dumps(v)}")]
            started.append(subprocess.Popen([*base, *sets, "--", *words]))
        codes = [process.wait() for process in started]
    finally:
        for process in started:
            if process.poll() is None:
                process.terminate()
                process.wait()
    return next((code for code in codes if code), 0)


def _combinations(vary: tuple[str, ...]) -> Iterator[dict[str, Any]]:
    from sapwood.clone.order import parse_overrides

    lists = parse_overrides(vary)
    for path, values in lists.items():
        if not isinstance(values, list) or not values:
            raise ConfigError(f"--vary {path}: expected a list, as in {path}=[0.1,0.01]")
    for values in itertools.product(*lists.values()):
        yield dict(zip(lists, values, strict=True))
