"""What runs inside the clients of store_io.py and store_clients.py."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from core.rank import Context

from sapwood.buffers import FaultCount

from .store_models import Model, build, nbytes_of
from .store_ways import WAYS, Memcpy, Way, bytes_view

__all__ = ["CONTENDERS", "create", "finish", "prepare", "turn"]

TIMES = 5
"""A load is timed so often in a turn, and the median counts: it is short beside a save."""


class Workload:
    def __init__(self, context: Context) -> None:
        self.model: Model = build(context.case)
        self.out = {key: torch.ones_like(value) for key, value in self.model.tensors.items()}
        self.turns = 0


def prepare(context: Context) -> Workload:
    return Workload(context)


def create(
    workload: Workload, context: Context, made: dict[str, Any], contender: str
) -> dict[str, Any]:
    """A first round: caches are warm after it, and what comes back is compared."""
    try:
        made[contender] = CONTENDERS[contender](workload, context)
        turn(workload, context, made, contender, check=True)
    except Exception as error:
        made.pop(contender, None)
        return {"error": f"{type(error).__name__}: {error}"}
    return {}


@torch.no_grad()
def turn(
    workload: Workload, context: Context, made: dict[str, Any], contender: str, check: bool = False
) -> dict[str, float]:
    way, model = made[contender], workload.model
    workload.turns += 1
    name = f"model{workload.turns}-{context.rank}"
    model.refresh()
    found: dict[str, float] = {}
    context.barrier()
    with FaultCount(process=True) as faults:
        found["save"] = seconds(lambda: way.save(name, model.tensors))
    context.barrier()
    found["faults"] = faults.minor
    way.settle()
    found["stored"] = way.stored() / nbytes_of(model.tensors)
    try:
        found |= loads(workload, context, way, name, check=check)
    finally:
        context.barrier()
        way.remove(name)
    return found


def loads(
    workload: Workload, context: Context, way: Way, name: str, *, check: bool
) -> dict[str, float]:
    found: dict[str, float] = {}
    cold = bool(context.options.get("cold"))
    for share, names in workload.model.parts.items():
        out = {key: workload.out[key] for key in names}
        if check:
            spoil(out)
            way.load(name, out)
            compare(workload, names)
        if cold and share != 100:
            continue
        metric = "load" if share == 100 else f"part{share}"
        found[metric] = median(context, way, lambda out=out: way.load(name, out), cold=cold)
    names = list(workload.model.tensors)
    if not cold and way.attach(name, names) is not None:
        found["attach"] = median(context, way, lambda: way.attach(name, names), cold=False)
    return found


def median(context: Context, way: Way, call: Callable[[], Any], *, cold: bool) -> float:
    taken = []
    for _ in range(1 if cold else TIMES):
        if cold:
            way.forget()
        context.barrier()
        taken.append(seconds(call))
    return sorted(taken)[len(taken) // 2]


def seconds(call: Callable[[], Any]) -> float:
    begun = time.perf_counter()
    call()
    return time.perf_counter() - begun


def spoil(tensors: Mapping[str, torch.Tensor]) -> None:
    for tensor in tensors.values():
        tensor.fill_(-1)


def compare(workload: Workload, names: Sequence[str]) -> None:
    for key in names:
        saved, loaded = workload.model.tensors[key], workload.out[key]
        if not (bytes_view(saved) == bytes_view(loaded)).all():
            raise RuntimeError(f"{key} did not come back as it was saved")


def finish(workload: Workload, context: Context, made: dict[str, Any]) -> dict[str, Any]:
    return {"bytes": nbytes_of(workload.model.tensors)}


def folder(context: Context, name: str) -> Path:
    return Path(context.options["folder"]) / f"{name.replace(' ', '-')}-{context.rank}"


def peer(name: str) -> Callable[[Workload, Context], Way]:
    return lambda _, context: WAYS[name](folder(context, name), context.case["durability"])


def memcpy(workload: Workload, context: Context) -> Way:
    return Memcpy(folder(context, "memcpy"), context.case["durability"], workload.out)


def ours(name: str) -> Callable[[Workload, Context], Way]:
    def make(_: Workload, context: Context) -> Way:
        from .store_ours import Ours

        where = dict(context.options["servers"].get(name, {}))
        own = folder(context, name)
        place = where.pop("place", str(own / "models"))
        return Ours(own, context.case["durability"], place, **where)

    return make


def mooncake(workload: Workload, context: Context) -> Way:
    from .store_mooncake import Mooncake

    return Mooncake(
        folder(context, "mooncake"),
        context.case["durability"],
        context.options["servers"]["mooncake"],
        2 * nbytes_of(workload.model.tensors),
    )


CONTENDERS: dict[str, Callable[[Workload, Context], Way]] = {
    **{name: peer(name) for name in WAYS},
    "sapwood": ours("sapwood"),
    "sapwood on demand": ours("sapwood on demand"),
    "sapwood tcp": ours("sapwood tcp"),
    "sapwood folder": ours("sapwood folder"),
    "mooncake": mooncake,
    "memcpy": memcpy,
}
