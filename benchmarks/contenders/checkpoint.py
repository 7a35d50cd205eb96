"""What runs inside the ranks of checkpoint_step.py: steps, a checkpoint, and the step after it.

A turn of a contender is: ordinary steps, the step that is saved, the next step, and then, outside
what is timed, waiting until the checkpoint is durable. Nothing of a checkpoint reaches into the
turn of another contender.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from core.processes import group_cpu_seconds
from core.rank import Context

from .files import tree_bytes
from .savers import SAVERS
from .taking import Contender, Peer
from .taking_ours import MODES, Ours
from .training import (
    Ddp,
    Sapwood,
    Training,
    Workload,
    clones,
    digests,
    make,
    prepare,
    put_back,
    spoil,
    state_bytes,
)

__all__ = ["CONTENDERS", "course", "create", "prepare", "size", "turn", "verify"]

BASELINES: dict[str, type[Training]] = {
    "no checkpoint, ddp": Ddp,
    "no checkpoint, sapwood": Sapwood,
}
# auto tries two ways twice each, and a turn has two checkpoints.
AUTO_TURNS = 2


def measured(contender: Contender) -> dict[str, Any]:
    """One checkpoint, with the CPU time of all processes until it is durable."""
    context = contender.context
    context.barrier()
    leads = context.rank == 0
    cpu, had = (group_cpu_seconds(), tree_bytes(contender.folder)) if leads else (0.0, 0)
    context.barrier()
    found = contender.checkpoint()
    contender.settle()
    context.barrier()
    if leads:
        contender.sync()
    context.barrier()
    found.durable = time.perf_counter() - found.called
    if leads:
        cpu = group_cpu_seconds() - cpu
        found.written = tree_bytes(contender.folder) - had
    return {**asdict(found), "cpu": cpu}


def turn(
    workload: Workload,
    context: Context,
    made: dict[str, Any],
    contender: str,
    baseline_steps: int,
) -> dict[str, Any]:
    if contender in BASELINES:
        return baseline(made[contender], context, baseline_steps)
    try:
        return save_once(made[contender])
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}


def save_once(chosen: Contender) -> dict[str, Any]:
    chosen.begin()
    for _ in range(chosen.warm_saves):
        plain_steps(chosen)
        measured(chosen)
    plain_steps(chosen)
    found = measured(chosen)
    chosen.end()
    return found


def course(
    workload: Workload,
    context: Context,
    made: dict[str, Any],
    contender: str,
    steps: int,
    every: int,
) -> dict[str, Any]:
    """A whole training with checkpoints, or without; no two of its steps are told apart."""
    try:
        if contender in BASELINES:
            return plain_course(made[contender], context, steps)
        return saved_course(made[contender], context, steps, every)
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}


def plain_course(training: Training, context: Context, steps: int) -> dict[str, Any]:
    training.step()
    context.barrier()
    begun = time.perf_counter()
    for _ in range(steps):
        training.step()
    return {"run": time.perf_counter() - begun}


def saved_course(chosen: Contender, context: Context, steps: int, every: int) -> dict[str, Any]:
    warm_up(chosen, every)
    had = tree_bytes(chosen.folder) if context.rank == 0 else 0
    context.barrier()
    found = chosen.course(steps, every)
    chosen.settle()
    context.barrier()
    if context.rank == 0:
        chosen.sync()
    context.barrier()
    stop = time.perf_counter() - found.ended
    written = tree_bytes(chosen.folder) - had if context.rank == 0 else 0
    chosen.end()
    return {**asdict(found), "stop": stop, "written": written}


def warm_up(chosen: Contender, every: int) -> None:
    """A first checkpoint, in which buffers are made; then the steps up to the timed ones."""
    if isinstance(chosen, Ours):
        chosen.open(every, every // 2 + 2)
        chosen.checkpointer.save()
        chosen.training.step()
        chosen.checkpointer.wait()  # with every=1 that step was saved, too
    else:
        chosen.begin()
        chosen.training.step()


def plain_steps(contender: Contender) -> None:
    for _ in range(contender.plain):
        contender.training.step()


def baseline(training: Training, context: Context, steps: int) -> dict[str, Any]:
    training.step()
    context.barrier()
    cpu = group_cpu_seconds() if context.rank == 0 else 0.0
    context.barrier()
    seconds = [training.timed_step() for _ in range(steps)]
    context.barrier()
    used = group_cpu_seconds() - cpu if context.rank == 0 else 0.0
    return {"steps": seconds, "cpu": used / steps}


def create(
    workload: Workload, context: Context, made: dict[str, Any], contender: str
) -> dict[str, Any]:
    """Makes a contender; a peer that cannot be made is reported and does not end the rank."""
    return make(CONTENDERS, workload, context, made, contender)


def verify(
    workload: Workload, context: Context, made: dict[str, Any], contender: str
) -> dict[str, Any]:
    """Saves, trains on, spoils the state and loads it: digests of what was and what came back."""
    if contender in BASELINES or contender == "memcpy":
        turn(workload, context, made, contender, 1)
        return {}
    try:
        return saved_and_loaded(made[contender])
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}


def saved_and_loaded(contender: Contender) -> dict[str, Any]:
    """What the saved step left is known by training it again, from the state before it.

    A digest taken between the save and the next step would give a capture time to finish, and so
    hide one that the next step can tear.
    """
    if isinstance(contender, Ours) and contender.mode == "auto":
        learn(contender)
    contender.begin()
    training = contender.training
    plain_steps(contender)
    before, steps = clones(training.plain, training.optimizer), training.steps
    contender.checkpoint()
    contender.settle()
    put_back(before, training.plain, training.optimizer)
    training.steps = steps
    training.step()
    live = digests(training.plain, training.optimizer)
    contender.context.barrier()
    spoil(training.plain, training.optimizer)
    contender.restore()
    loaded = digests(training.plain, training.optimizer)
    contender.end()
    return {"live": live, "loaded": loaded}


def learn(contender: Contender) -> None:
    """Turns in which auto finds out what each way costs."""
    for _ in range(AUTO_TURNS):
        contender.begin()
        for _ in range(2):
            plain_steps(contender)
            measured(contender)
        contender.end()


def size(workload: Workload, context: Context, made: dict[str, Any]) -> int:
    training = workload.training(Ddp, context)
    return state_bytes(training.plain, training.optimizer)


def peer(name: str) -> Callable[[Workload, Context], Contender]:
    return lambda workload, context: Peer(workload.training(Ddp, context), context, name)


def ours(name: str) -> Callable[[Workload, Context], Contender]:
    return lambda workload, context: Ours(workload.training(Sapwood, context), context, name)


CONTENDERS: dict[str, Callable[[Workload, Context], Any]] = {
    **{name: ours(name) for name in MODES},
    **{name: peer(name) for name in SAVERS},
    **{
        name: lambda workload, context, kind=kind: workload.training(kind, context)
        for name, kind in BASELINES.items()
    },
}
