"""How long this job has been running, and how long it may."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping

from sapwood.errors import ConfigError
from sapwood.runtime.folder import process_start

__all__ = ["process_age", "slurm_seconds_left", "started_again"]

_END = "SLURM_JOB_END_TIME"


def started_again(env: Mapping[str, str] | None = None) -> bool:
    """Whether torchrun or ``sapwood run`` started this rank after an attempt that ended."""
    env = os.environ if env is None else env
    return env.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"


def process_age(env: Mapping[str, str] | None = None) -> float:
    """Seconds since this process began; for a rank started again, since its launcher did.

    A launcher that restarts ranks does so inside the same job, whose time goes on.
    """
    began = process_start(os.getppid() if started_again(env) else os.getpid())
    if began is None:
        return time.process_time()
    return time.clock_gettime(time.CLOCK_BOOTTIME) - began / os.sysconf("SC_CLK_TCK")


def slurm_seconds_left(env: Mapping[str, str] | None = None) -> float:
    """Seconds until the Slurm job ends.

    Raises:
        ConfigError: Slurm does not say when.
    """
    env = os.environ if env is None else env
    try:
        return float(env[_END]) - time.time()
    except (KeyError, ValueError):
        raise ConfigError(
            f"time_limit is 'slurm', but {_END} is {env.get(_END)!r} here, expected seconds since "
            "1970; Slurm sets it since 22.05: give a time such as '3h55m' instead"
        ) from None
