"""What a run's folder says about the run: how it was made, and how it ended."""

from __future__ import annotations

import dataclasses
import platform
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import torch

from sapwood._version import __version__
from sapwood.runtime.folder import host_facts
from sapwood.runtime.group import Group
from sapwood.runtime.settings import Resolved
from sapwood.runtime.stopped import Stopped

__all__ = ["final_status", "run_facts"]


def run_facts(
    group: Group,
    settings: Sequence[Resolved[Any]],
    layout: Mapping[str, Any],
    lineage: Mapping[str, Any],
) -> dict[str, Any]:
    """For ``run.toml``; ``layout`` is what was chosen, ``lineage`` where a fork came from."""
    config = {
        name: {"value": value, "origin": resolved.origins[name]}
        for resolved in settings
        for name, value in dataclasses.asdict(resolved.value).items()
    }
    return {
        **lineage,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "world": group.world,
        "host": host_facts(),
        "versions": {
            "sapwood": __version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        "config": config,
        "layout": {**layout, "launcher": group.launch.launcher},
    }


def final_status(
    step: int, error: BaseException | None, stopped: Stopped | None
) -> tuple[str, int, str | None]:
    """For ``status.json``, when the run is over."""
    if error is not None:
        return "failed", step, f"{type(error).__name__}: {error}"
    if stopped is not None:
        return "stopped", step, str(stopped)
    return "ended", step, None
