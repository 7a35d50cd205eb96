"""Which way of averaging a group uses: agreed once, by all ranks."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Literal

from sapwood.errors import ConfigError
from sapwood.runtime.group import Group
from sapwood.runtime.machines import Machines, find_machines
from sapwood.sync.averaging.base import Averager
from sapwood.sync.averaging.direct import DirectAverager
from sapwood.sync.averaging.node import NodeAverager

__all__ = ["Averaging", "choose_averager"]

log = logging.getLogger(__name__)
Wanted = Literal["auto", "direct", "node"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Averaging:
    """The chosen way, and why."""

    averager: Averager
    machines: Machines | None
    """Who shares a machine; None where nobody asked."""
    reason: str


def choose_averager(
    group: Group, wanted: Wanted, *, engine: str = "layerwise", nbytes: int = 1
) -> Averaging:
    """The averager for ``group``; a wish is fulfilled or refused.

    ``nbytes`` of gradients will be averaged: a limit may allow little memory and refuse much.

    Raises:
        ConfigError: ``node`` was asked for, and is not possible.
    """
    if engine == "ddp":
        if wanted == "node":
            raise ConfigError(
                "averaging='node' is not possible with engine='ddp': DistributedDataParallel sends "
                "its own all-reduce over all ranks; use engine='layerwise', or averaging='auto'"
            )
        return _direct(group, None, "DistributedDataParallel sends its own all-reduce")
    if group.world == 1 or wanted == "direct":
        reason = "asked for" if group.world > 1 else "one rank has nothing to average"
        return _direct(group, None, reason)
    if group.device.type != "cpu":
        if wanted == "node":
            raise ConfigError(
                f"averaging='node' sums in the machine's memory, but the model is on "
                f"{group.device.type}, whose own library does that better; use 'auto' or 'direct'"
            )
        return _direct(group, None, f"{group.device.type} has its own way inside a machine")
    machines, links, problem = find_machines(group)
    if wanted == "auto" and not machines.shared:
        links.close()
        return _direct(group, machines, problem or "no two ranks share a machine")
    if problem:
        raise ConfigError(
            f"averaging='node' is not possible: {problem}; use averaging='direct', or see that "
            "abstract Unix sockets are allowed and that the ranks of a machine run as one user in "
            "one network namespace"
        )
    try:
        averager = NodeAverager(group, machines, links)
    except BaseException:
        links.close()
        raise
    try:
        problem = averager.try_out(nbytes)
    except BaseException:
        averager.close()
        raise
    if not problem:
        return Averaging(averager=averager, machines=machines, reason=str(machines))
    averager.close()
    if wanted == "node":
        raise ConfigError(
            f"averaging='node' is not possible: {problem}; use averaging='direct', or see that "
            "memfd_create is allowed and that limits (ulimit -n, -f, -v) leave room for it"
        )
    log.warning("averaging directly: ranks of one machine cannot share memory (%s)", problem)
    return _direct(group, machines, problem)


def _direct(group: Group, machines: Machines | None, reason: str) -> Averaging:
    return Averaging(averager=DirectAverager(group), machines=machines, reason=reason)
