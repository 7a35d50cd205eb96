"""What a run's folder says about the run: how it was made, and how it ended."""

from __future__ import annotations

import dataclasses
import json
import platform
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import torch

from sapwood._version import __version__
from sapwood.errors import PeerFailed
from sapwood.runtime.folder import host_facts
from sapwood.runtime.group import Group
from sapwood.runtime.handle import Parent
from sapwood.runtime.settings import Resolved
from sapwood.runtime.stopped import Stopped

__all__ = ["final_status", "run_facts"]


def run_facts(
    group: Group,
    settings: Sequence[Resolved[Any]],
    layout: Mapping[str, Any],
    parent: Parent | None,
) -> dict[str, Any]:
    """For ``run.toml``; ``layout`` is what was chosen, ``parent`` where a fork came from."""
    config = {
        name: {"value": value, "origin": resolved.origins[name]}
        for resolved in settings
        for name, value in dataclasses.asdict(resolved.value).items()
    }
    return {
        **_lineage(parent),
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


def _lineage(parent: Parent | None) -> dict[str, Any]:
    if parent is None:
        return {}
    overrides = {path: json.dumps(value) for path, value in parent.overrides.items()}
    return {"parent": parent.run, "parent_step": parent.step, "overrides": overrides}


def final_status(
    step: int, error: BaseException | None, stopped: Stopped | None
) -> tuple[str, int, str | None]:
    """For ``status.json``, when the run is over."""
    if error is not None:
        interrupted = _interrupted(error)
        if interrupted is not None:
            return "interrupted", step, interrupted
        return "failed", step, f"{type(error).__name__}: {error}"
    if stopped is not None:
        return "stopped", step, str(stopped)
    return "ended", step, None


def _interrupted(error: BaseException) -> str | None:
    """Who was interrupted, if that ended the run: somebody pressed Ctrl-C, and nothing failed."""
    if isinstance(error, KeyboardInterrupt):
        return "by Ctrl-C (SIGINT); what was not saved is lost"
    # A terminal interrupts all ranks at once, and some hear of another's end before their own.
    if isinstance(error, PeerFailed) and f"failed: {KeyboardInterrupt.__name__}" in str(error):
        which = "another rank" if error.rank is None else f"rank {error.rank}"
        return f"by Ctrl-C (SIGINT) on {which}; what was not saved is lost"
    return None
