"""What can be set about checkpoints."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from sapwood.errors import ConfigError
from sapwood.runtime.durations import parse_seconds
from sapwood.tiers.spec import TierSpec
from sapwood.tiers.versions.facts import series_of

__all__ = ["CheckpointSettings", "tier_specs"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSettings:
    """When a checkpoint is taken, how its bytes are captured, and where they go."""

    every: int | str | None = None
    """Take a checkpoint every n steps, or by time, such as "10min"; None: only when ``save`` is
    called."""
    mode: Literal["auto", "lazy", "backward", "sharded", "single"] = "auto"
    """How bytes are captured; ``auto`` measures and picks."""
    overhead: float = 0.02
    """With ``auto``: the share of the time checkpoints may cost; they become rarer to keep it."""
    stretch: bool = True
    """With ``auto``: checkpoints may become rarer than ``every``, which is said once. False: they
    are taken when they are due, whatever they cost."""
    engine: Literal["node", "sync"] = "node"
    """``node``: a process per node that outlives the ranks. ``sync``: in the rank, blocking."""
    linger: float = 60.0
    """Seconds the engine waits for ranks that come back after all of them died."""
    keep: int | None = 3
    """How many checkpoints to keep; None keeps all. ``retention`` says it in more detail."""
    patience: float = 30.0
    """Seconds a step that is due waits for staging memory; then it is not saved."""
    drain_timeout: float = 600.0
    """Seconds ``close`` waits for checkpoints that are under way."""
    max_failures: int | None = 5
    """Checkpoints in a row that may fail with a warning; from then on the training is told by an
    exception. None: never."""
    check_replicas: Literal["raise", "warn", "off"] = "raise"
    """What to do when ranks that must have equal tensors have not: save nothing and raise, or save
    and warn. ``off``: do not compare. Rank 0's setting counts."""

    @property
    def steps(self) -> int | None:
        """The steps between checkpoints, where they are counted in steps."""
        return self.every if isinstance(self.every, int) else None

    @property
    def seconds(self) -> float | None:
        """The seconds between checkpoints, where they are taken by time."""
        return parse_seconds(self.every, "every") if isinstance(self.every, str) else None

    def __post_init__(self) -> None:
        """Refuse values that cannot work."""
        if isinstance(self.every, str) and (self.every.strip().isdigit() or not self.seconds):
            raise ConfigError(
                f"every is {self.every!r}, expected a number of steps such as 50, or a time with a "
                'unit such as "90s" or "10min"'
            )
        for name in ("steps", "keep", "max_failures"):
            value = getattr(self, name)
            if value is not None and value < 1:
                name = "every" if name == "steps" else name
                raise ConfigError(f"{name} is {value}, expected at least 1, or none")
        if not 0 < self.overhead < 1:
            raise ConfigError(f"overhead is {self.overhead}, expected a share such as 0.02")
        for name in ("linger", "patience", "drain_timeout"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ConfigError(f"{name} is {getattr(self, name)}, expected seconds")


def tier_specs(place: str | Path, tiers: Sequence[str | TierSpec] | None) -> tuple[TierSpec, ...]:
    """The tiers of a checkpointer: memory and the given place, unless the user says otherwise.

    ``external`` without a folder means the place; ``local`` without one a folder inside it.
    Folders become absolute here, once for all who use them.
    """
    text = str(place)
    if text.startswith("store://"):
        raise ConfigError(
            f"the place is {text}, expected a folder or s3://bucket/prefix; name the repository "
            f'among the tiers: tiers=("memory", {text!r})'
        )
    home = TierSpec.parse(text) if text.startswith("s3://") else None
    chosen = tiers if tiers is not None else ("memory", "s3" if home else "external")
    specs = [_in_series(_placed(_spec(t, home), text, home).resolved(), text) for t in chosen]
    names = [spec.kind for spec in specs]
    twice = {name for name in names if names.count(name) > 1}
    if twice:
        raise ConfigError(f"tier {twice.pop()!r} is given twice")
    if not set(names) - {"memory"}:
        raise ConfigError("all tiers are memory, so no checkpoint would ever be durable")
    return tuple(specs)


def _in_series(spec: TierSpec, place: str) -> TierSpec:
    """A repository may hold the checkpoints of many trainings: their places tell them apart."""
    if spec.kind != "store" or spec.series:
        return spec
    here = place if "://" in place else str(Path(place).resolve())
    return replace(spec, series=series_of(spec.name, here))


def _spec(given: str | TierSpec, home: TierSpec | None) -> TierSpec:
    if isinstance(given, TierSpec):
        return given
    return home if given == "s3" and home is not None else TierSpec.parse(given)


def _placed(spec: TierSpec, place: str, home: TierSpec | None) -> TierSpec:
    nodes = str(Path(place) / "nodes")
    defaults = {"external": place, "local": nodes, "partner": nodes}
    scheme = spec.place.partition(":")[0] or "4+2"
    defaults["parity"] = f"{scheme}:{nodes}"
    if spec.folder or spec.kind not in defaults:
        return spec
    if home is not None:
        prefix = f"parity:{scheme}" if spec.kind == "parity" else spec.kind
        raise ConfigError(f"the place is {place}; give the tier a folder: {prefix}:/path")
    return replace(spec, place=defaults[spec.kind])
