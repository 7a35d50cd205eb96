"""What a Checkpointer is given, checked before an engine is started for it.

A mistake found here costs a second; found at the first step that is due, it costs that checkpoint
and those after it.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sapwood.errors import CheckpointError, ConfigError
from sapwood.runtime.handle import RunHandle

__all__ = ["check_callables", "check_run", "folder_of", "metrics_given", "numbers"]


def check_run(run: RunHandle) -> None:
    """Refuse what is not a Run, and one that is closed or in the middle of a step.

    Raises:
        ConfigError: it is no Run.
        UsageError: nothing can be saved of it now.
    """
    if not hasattr(run, "check_between_steps"):
        raise ConfigError(
            f"the first argument of Checkpointer is a {type(run).__name__}, expected a sapwood.Run"
        )
    run.check_between_steps("Checkpointer()")


def folder_of(place: str | Path) -> str | Path:
    """The place, if it can be one: a folder that is there or can be made, or a URL.

    Raises:
        ConfigError: it is of another type, empty, or something else than a folder.
    """
    if not isinstance(place, (str, os.PathLike)) or not str(place):
        raise ConfigError(f"place is {place!r}, expected a folder or s3://bucket/prefix")
    if str(place).startswith(("s3://", "store://")):
        return place
    try:
        there = Path(place).stat()
    except (FileNotFoundError, PermissionError):
        return place
    except (OSError, ValueError) as error:  # too long, below a file, or with a null byte
        raise ConfigError(f"place is {str(place)!r}, which cannot be a folder: {error}") from error
    if not stat.S_ISDIR(there.st_mode):
        raise ConfigError(f"place is {str(place)!r}, which is no folder; choose another name")
    return place


def check_callables(**given: Any) -> None:
    """Refuse callbacks and policies that cannot be called; None is left out.

    Raises:
        ConfigError: one cannot be; it is named.
    """
    for name, value in given.items():
        if value is not None and not callable(value):
            raise ConfigError(f"{name} is {value!r}, expected something that can be called")


def metrics_given(metrics: Any) -> dict[str, Any]:
    """Numbers by name, or None for none.

    Raises:
        ConfigError: it is no mapping.
    """
    if metrics is None:
        return {}
    if not isinstance(metrics, Mapping):
        raise ConfigError(
            f"metrics is a {type(metrics).__name__}, expected numbers by name, such as "
            '{"loss": 0.3}'
        )
    return dict(metrics)


def numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Metrics as plain numbers, also those of numpy and tensors of one element.

    Raises:
        CheckpointError: one is no number.
    """
    found: dict[str, float] = {}
    for name, value in metrics.items():
        try:
            found[str(name)] = value if type(value) in (int, float) else float(value)
        except (TypeError, ValueError, RuntimeError) as error:
            raise CheckpointError(
                f"ckpt.metrics[{name!r}] is a {type(value).__name__}, expected a number"
            ) from error
    return found
