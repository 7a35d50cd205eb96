"""Metrics, and which way they are better, for rules that choose by one."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable

from sapwood.cli.verbs.ckpt.survey import Checkpoint
from sapwood.errors import ConfigError

__all__ = ["check_metric", "less_is_better"]

# Only where nobody means the other: a wrong guess would remove the best checkpoint.
_LOWER = {"loss", "losses", "error", "err", "nll", "perplexity", "ppl", "mse", "rmse", "mae", "wer"}
_HIGHER = {"accuracy", "acc", "f1", "auc", "auroc", "bleu", "rouge", "iou", "precision", "recall"}


def less_is_better(metric: str, lower: bool, higher: bool) -> bool:
    """Which way a metric is better: as the user says, else as its name says (``val/loss``).

    Raises:
        ConfigError: neither says, or they say both.
    """
    if lower and higher:
        raise ConfigError(f"--best {metric}: say either --lower or --higher, whichever is better")
    if lower or higher:
        return lower
    words = set(re.split(r"[^a-z0-9]+", metric.lower()))
    less, more = bool(words & _LOWER), bool(words & _HIGHER)
    if less == more:
        raise ConfigError(
            f"--best {metric}: the name does not tell which way is better; say --lower or --higher"
        )
    return less


def check_metric(metric: str, checkpoints: Iterable[Checkpoint]) -> None:
    """See that some checkpoint has a metric to be chosen by.

    Raises:
        ConfigError: none has; the message names the metrics there are.
    """
    found = {k for c in checkpoints for k, v in c.metrics.items() if not math.isnan(v)}
    if metric not in found:
        known = ", ".join(sorted(found)) or "none: no checkpoint was saved with one"
        raise ConfigError(f"--best {metric}: no checkpoint here has that metric; there is {known}")
