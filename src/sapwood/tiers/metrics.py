"""The numbers saved with a checkpoint, as a record has them: JSON knows no infinity and no nan."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from sapwood.errors import CheckpointError

__all__ = ["metrics_of", "plain_metrics"]

_NAME = "metrics"


def plain_metrics(metrics: Mapping[str, Any]) -> dict[str, float | str]:
    """Numbers of any kind for a record; those JSON has no word for as a text.

    Raises:
        CheckpointError: one is no number.
    """
    found: dict[str, float | str] = {}
    for name, value in metrics.items():
        try:
            number = float(value)
        except (TypeError, ValueError, RuntimeError) as error:
            raise CheckpointError(f"metrics[{name!r}] is {value!r}, expected a number") from error
        found[str(name)] = number if math.isfinite(number) else repr(number)
    return found


def metrics_of(extras: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a record; earlier versions wrote ``NaN`` and ``Infinity`` as they are."""
    return {name: float(value) for name, value in extras.get(_NAME, {}).items()}
