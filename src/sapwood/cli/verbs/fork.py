"""``sapwood fork``."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from sapwood.cli.values import Whole
from sapwood.errors import CloneError, ConfigError

if TYPE_CHECKING:
    from sapwood.clone.address import Address
    from sapwood.clone.order import ForkOrder

__all__ = ["fork"]

_PYTHONS = ("python", "python3", "sapwood")
# The library has these too, but loads torch.
Approach = Literal["deepclone", "lazy", "p2p", "file"]
Transport = Literal["auto", "gloo", "memory", "mpi", "mooncake", "nccl"]


def fork(
    run: str,
    /,
    *command: str,
    ranks: Annotated[Whole | None, Parameter(name=("-n", "--ranks"))] = None,
    changes: Annotated[tuple[str, ...], Parameter(name="--set", negative="")] = (),
    vary: Annotated[tuple[str, ...], Parameter(name="--vary", negative="")] = (),
    control: Annotated[bool, Parameter(negative="")] = False,
    at_step: Whole | None = None,
    approach: Approach | None = None,
    transport: Transport | None = None,
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
    sapwood fork latest --set optimizer.lr=0.01 -- train.py      with another learning rate
    sapwood fork 20261116 --vary optimizer.lr=[0.1,0.01] --control -- train.py    three forks
    sapwood fork 20261116 --at-step 5000 -- train.py             from the state after step 5000
    sapwood fork 20261116 --standby -n 2 -- train.py             ready to begin, and waiting
    sapwood fork 20261116 --go                                   now
    srun -n 8 sapwood fork /shared/runs/20261116-0042-3f9a1c -- train.py
    ```

    Args:
        run: A run's folder, its id, a beginning of the id, or latest.
        command: The script and its arguments, as for `sapwood run`.
        ranks: How many ranks to start for each fork (one if not given).
        changes: PATH=VALUE: what shall be different. `optimizer.*` is changed in the optimizer; the
            script asks for the rest with `run.override(path, default)`.
        vary: PATH=[A,B,...]: one fork for each value, all at once and all from the same step;
            several make all combinations.
        control: With --vary: one more fork of that step, without the varied values.
        at_step: Begin with the state after this step, which must still be to come.
        approach: How the state is sent; by default what the run is set to.
        transport: What carries it; by default what the run is set to.
        standby: Start the ranks and get ready, but wait until the run, or --go, says so.
        go: Let clones that stand by begin; takes no script and no other option.
        folder: The folder that holds the run folders.
    """
    from sapwood.cli.folders import CLONES, find_run
    from sapwood.clone.address import Address
    from sapwood.clone.order import ForkOrder, parse_overrides
    from sapwood.clone.overrides import check_overrides

    if go:
        given = (command, ranks, changes, vary, control, at_step, approach, transport, standby)
        _check_alone(any(one not in (None, (), False) for one in given))
        return _go(Address.read(find_run(run, folder, need=CLONES)))
    words = _script(command)
    _check_steps(at_step, standby=standby)
    if control and not vary:
        raise ConfigError("--control belongs to --vary: a fork without changes needs no control")
    overrides = parse_overrides(changes)
    check_overrides(overrides)
    variants = _variants(overrides, parse_overrides(vary, "--vary"), control=control)
    address = Address.read(find_run(run, folder, need=CLONES))
    address.token()  # whoever cannot read it, or is on another machine, need not start
    address.check_reach()
    orders = [
        ForkOrder(
            address=address,
            overrides=chosen,
            approach=approach or "",
            transport=transport or "",
            standby=standby,
            at_step=at_step,
        )
        for chosen in variants
    ]
    if vary:
        from sapwood.cli.variants import start_variants

        return start_variants(orders, words, ranks)
    return _start(orders[0], words, ranks)


def _start(order: ForkOrder, words: list[str], ranks: int | None) -> int:
    from sapwood.cli.verbs.run import run as start
    from sapwood.clone.order import ENV

    os.environ[ENV] = order.encode()
    try:
        if words[0] == "-m":
            return start(*words[1:], ranks=ranks, module=True)
        return start(*words, ranks=ranks)
    finally:
        del os.environ[ENV]


def _go(address: Address) -> int:
    from sapwood.cli.output import console
    from sapwood.clone.listener import ask

    count = ask(address, {"op": "go"})["started"]
    if not count:
        raise CloneError(
            "no clones stand by, so none begins; start some with --standby, and wait until they "
            "are ready"
        )
    what = "1 group that stood by begins" if count == 1 else f"{count} groups that stood by begin"
    console().print(what)
    return 0


def _check_alone(given: bool) -> None:
    if given:
        raise ConfigError(
            "--go lets clones begin that stand by, as they were started; it takes no script and no "
            "other option but --folder"
        )


def _check_steps(at_step: int | None, *, standby: bool) -> None:
    if at_step is not None and at_step < 1:
        raise ConfigError(f"--at-step is {at_step}, expected 1 or more")
    if at_step is not None and standby:
        raise ConfigError(
            "--at-step names when to begin, and --standby waits to be told; give one of them"
        )


def _script(command: tuple[str, ...]) -> list[str]:
    words = list(command)
    if words[:1] and Path(words[0]).name in _PYTHONS:
        words = words[1:]
        if words[:1] == ["run"]:
            words = words[1:]
    if not words or words == ["-m"]:
        raise ConfigError("there is no script to fork; put it behind --, as in -- train.py")
    return words


def _variants(
    overrides: dict[str, Any], lists: dict[str, Any], *, control: bool
) -> list[dict[str, Any]]:
    """What is changed in each fork: every combination of the varied values, the control first."""
    import itertools

    from sapwood.clone.overrides import check_overrides

    for path, values in lists.items():
        if not isinstance(values, list) or not values:
            raise ConfigError(f"--vary {path}: expected a list, as in {path}=[0.1,0.01]")
        if path in overrides:
            raise ConfigError(f"{path} is in --set and in --vary; give it once")
        for value in values:
            check_overrides({path: value})
    found = [
        {**overrides, **dict(zip(lists, values, strict=True))}
        for values in itertools.product(*lists.values())
    ]
    return [overrides, *found] if control else found
