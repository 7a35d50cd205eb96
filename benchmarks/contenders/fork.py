"""What runs inside the ranks of clone_fork.py, in the donors and in the clones.

A turn of a contender: the clones build a fresh model and wait; the donors train ordinary steps; the
clones are told to come; when they are ready to receive, the donors train the step that is cloned,
the next one, and go on until every clone could train. Where their first step counts, the clones
train it only then, beside donors' steps that are not timed any more: all of them compute with the
cores of one machine, and who is ready sooner must not be the one whose donors are slower. What was
built is taken down last.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from core.processes import group_cpu_seconds
from core.rank import Context

from .fork_clones import Clone, OurClone, PeerClone
from .fork_donors import Donor, OurDonor, PeerDonor, agreed
from .fork_meeting import Turn, visit
from .fork_orders import ORDERS
from .fork_torchft import TorchftHttp, TorchftPg
from .fork_training import DONORS, ForkedDdp, ForkedSapwood
from .fork_ways import FiledSafetensors, FiledTorch, Gloo, Loopback, Mpi, Way
from .training import Workload, clones, digests, make, prepare, put_back, state_bytes

__all__ = ["CONTENDERS", "create", "donate", "prepare", "receive", "size"]

WAYS: dict[str, type[Way]] = {
    "file torch.save": FiledTorch,
    "file safetensors": FiledSafetensors,
    "p2p gloo": Gloo,
    "p2p mpi4py": Mpi,
    "torchft http": TorchftHttp,
    "torchft pg": TorchftPg,
    "loopback": Loopback,
}
_STORES: dict[int, Any] = {}


def meeting(context: Context) -> Any:
    """One connection to the parent's store per process."""
    port = context.options["port"]
    if port not in _STORES:
        _STORES[port] = visit(port, context.options["host"])
    return _STORES[port]


def create(
    workload: Workload, context: Context, made: dict[str, Any], contender: str
) -> dict[str, Any]:
    return make(CONTENDERS, workload, context, made, contender)


def donate(
    workload: Workload,
    context: Context,
    made: dict[str, Any],
    contender: str,
    number: int,
    baseline_steps: int,
    check: bool,
    first: bool,
) -> dict[str, Any]:
    turn = Turn(meeting(context), number)
    donor: Donor = made[contender]
    try:
        turn.hear("built")
        found = give(donor, turn, baseline_steps, check=check)
        if first and not check:
            train_beside(donor, turn)
    except Exception as error:
        turn.fail(f"{type(error).__name__}: {error}")
        return {"error": f"{type(error).__name__}: {error}"}
    finally:
        if context.rank == 0:
            turn.say("over")
        donor.end()
    return found


def give(donor: Donor, turn: Turn, baseline_steps: int, *, check: bool) -> dict[str, Any]:
    training, context = donor.training, donor.context
    found = baseline(donor, baseline_steps)
    donor.join(turn)
    steps = training.steps
    before = clones(training.plain, training.optimizer) if check else {}
    cpu, own = read_cpu(context), time.process_time()
    found |= asdict(donor.fork(turn))
    count = 2
    # More steps than these would say nothing new: a blocking contender is over by now.
    while not agreed(turn.heard("ready") or turn.heard("failed")):
        training.step()
        count += 1
    turn.check()
    donor.settle()
    found["own_cpu"] = time.process_time() - own
    found |= {"cpu": read_cpu(context) - cpu, "trained": count, "sent": donor.sent()}
    if check:
        put_back(before, training.plain, training.optimizer)
        training.steps = steps
        training.step()
        found["live"] = digests(training.plain, training.optimizer)
    return found


def train_beside(donor: Donor, turn: Turn) -> None:
    """The clones train their first step, as they would in life, beside steps of the donors."""
    if donor.context.rank == 0:
        turn.say("train")
    while not agreed(turn.heard("trained") or turn.heard("failed")):
        donor.training.step()


def baseline(donor: Donor, steps: int) -> dict[str, Any]:
    training, context = donor.training, donor.context
    training.step()
    cpu, own = read_cpu(context), time.process_time()
    seconds, backwards = [], []
    for _ in range(steps):
        seconds.append(training.timed_step())
        backwards.append(training.ended_at - training.backward_at)
    own_used = time.process_time() - own
    used = read_cpu(context) - cpu
    return {
        "steps": seconds,
        "backwards": backwards,
        "step_cpu": used / steps,
        "own_step_cpu": own_used / steps,
    }


def read_cpu(context: Context) -> float:
    """Of both groups; all donors stand still meanwhile."""
    context.barrier()
    used = group_cpu_seconds() if context.rank == 0 else 0.0
    context.barrier()
    return used


def receive(
    workload: Workload,
    context: Context,
    made: dict[str, Any],
    contender: str,
    number: int,
    check: bool,
    first: bool,
) -> dict[str, Any]:
    turn = Turn(meeting(context), number)
    clone: Clone = made[contender]
    found: dict[str, Any] = {}
    try:
        state = clone.build()
        turn.count("built", context.world)
        clone.receive(state, turn)

        def ready() -> None:
            found["ready"] = time.perf_counter()
            turn.count("ready", context.world)

        if check:
            clone.complete()
            ready()
            found["loaded"] = digests(state.model, state.optimizer)
        elif first:
            seconds = clone.train(state, ready, lambda: turn.hear("train"))
            turn.count("trained", context.world)
            if clone.whole:
                found["first"] = found["ready"] + seconds
        else:
            ready()
        found |= {"since": clone.since, "needed": clone.needed}
        turn.hear("over")
    except Exception as error:
        turn.fail(f"{type(error).__name__}: {error}")
        found = {"error": f"{type(error).__name__}: {error}"}
    finally:
        clone.end()
        state = None  # type: ignore[assignment]
        gc.collect()
    return found


def size(workload: Workload, context: Context, made: dict[str, Any]) -> int:
    training = next(iter(workload.trainings.values()))
    return state_bytes(training.plain, training.optimizer)


def peer(name: str) -> Callable[[Workload, Context], Donor | Clone]:
    def build(workload: Workload, context: Context) -> Donor | Clone:
        way = WAYS[name](context, meeting(context))
        if context.options["side"] == DONORS:
            return PeerDonor(workload.training(ForkedDdp, context), context, way)
        return PeerClone(workload, context, way)

    return build


def ours(name: str) -> Callable[[Workload, Context], Donor | Clone]:
    def build(workload: Workload, context: Context) -> Donor | Clone:
        if context.options["side"] == DONORS:
            training = workload.training(ForkedSapwood, context)
            assert isinstance(training, ForkedSapwood)
            return OurDonor(training, context, name)
        return OurClone(workload, context, name)

    return build


CONTENDERS: dict[str, Callable[[Workload, Context], Donor | Clone]] = {
    **{name: ours(name) for name in ORDERS},
    **{name: peer(name) for name in WAYS},
}
