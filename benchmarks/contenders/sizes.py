"""Which model a case means: real computing on the cores, or an emulated device that leaves them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from core import Case, NotRun
from core.machine import field_of

Sizes = Mapping[str, Mapping[str, Any]]
"""Options of a workload, by ``compute`` and name; see ``model_of`` for what else they may hold."""
MIB = 2**20
# Parameters, gradients and buckets, and the optimizer's state, in units of the parameters.
COPIES = {"plain": 3, "sgd": 4, "adam": 5}
STATE = {"plain": 1, "sgd": 2, "adam": 3}
PROCESS = 400 * MIB


def model_of(case: Case, sizes: Sizes) -> dict[str, Any]:
    """Name and options for ``workloads.by_name``, and the optimizer.

    ``optimizer`` is sgd (with momentum) unless the options say adam, or plain (without).
    ``mb_all_ranks`` is divided by the ranks: all of them together then copy and send about as much,
    however many share the cores; ``most_mb_all_ranks`` does so only with what ``mb`` exceeds it by.
    ``full_speed_ranks`` makes an emulated device slower the more ranks there are beyond so many:
    what each of them does on the cores then takes the share of a step that it takes with few.
    ``most_mb_per_second`` makes it slower where all ranks together would have more bytes of weights
    for each second of a step: what moves them has only the cores of this machine.
    """
    compute, name = case["compute"], case["workload"]
    options = dict(sizes[compute][name])
    optimizer = options.pop("optimizer", "sgd")
    together = options.pop("mb_all_ranks", None)
    if together is not None:
        options["mb"] = together / case["ranks"]
    most = options.pop("most_mb_all_ranks", None)
    if most is not None:
        options["mb"] = min(options["mb"], most / case["ranks"])
    fast = options.pop("full_speed_ranks", None)
    densest = options.pop("most_mb_per_second", None)
    if compute == "emulated":
        preset = options.pop("preset", name)
        speed = options.get("speed", 1.0)
        if densest is not None:
            dense = case["ranks"] * options["mb"] * speed / _published_seconds(preset)
            speed *= min(1.0, densest / dense)
        if fast is not None:
            speed *= min(1.0, fast / case["ranks"])
        options["speed"] = speed
        return {
            "name": "emulated",
            "optimizer": optimizer,
            "options": {"preset": preset, **options},
        }
    return {
        "name": options.pop("model", name),
        "optimizer": optimizer,
        "options": options,
    }


def _published_seconds(preset: str) -> float:
    from sapwood.testing.workloads.presets import PRESETS

    return PRESETS[preset].forward + PRESETS[preset].backward


def source_of(model: Mapping[str, Any]) -> Any:
    from sapwood.testing import workloads

    return workloads.by_name(model["name"], **model["options"])


def check_memory(needed: int) -> None:
    """Raises NotRun where so many bytes are not free."""
    free = field_of("/proc/meminfo", "MemAvailable").split()
    if free[0].isdigit() and int(free[0]) * 1024 < needed:
        raise NotRun(f"needs {needed / 2**30:.1f} GiB, {int(free[0]) / MIB:.1f} GiB are available")


def checkpoint_bytes(ranks: int, model: Mapping[str, Any]) -> int:
    """Of all ranks: two trainings, ours and that of the peers, and two staged copies."""
    optimizer, parameters = model["optimizer"], source_of(model).parameter_bytes
    per_rank = (2 * COPIES[optimizer] + 2 * STATE[optimizer]) * parameters
    return ranks * (per_rank + PROCESS)


def fork_bytes(ranks: int, model: Mapping[str, Any]) -> int:
    """Of both sides: a donor has two trainings and, while it is checked, a copy of one state; a
    clone has a training, what it has read, and a share."""
    optimizer, parameters = model["optimizer"], source_of(model).parameter_bytes
    donor = 2 * COPIES[optimizer] + STATE[optimizer]
    clone = COPIES[optimizer] + 2 * STATE[optimizer]
    return ranks * ((donor + clone) * parameters + 2 * PROCESS)
