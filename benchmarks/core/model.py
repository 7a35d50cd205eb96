"""What a benchmark declares, and what the harness asks of a session."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

from .cases import Axes, Case

if TYPE_CHECKING:
    from .judge import Target

Role = Literal["ours", "variant", "peer", "baseline", "limit"]
Samples = dict[str, dict[str, list[float]]]


class NotRun(Exception):
    """A case cannot be measured here; the reason goes into the report."""


@dataclass(frozen=True, kw_only=True)
class Contender:
    """``ours`` is compared with each ``peer``; ``limit`` is the floor physics sets.

    A ``variant`` (ours, set differently) and a ``baseline`` are shown and never count as a peer.
    """

    name: str
    role: Role
    note: str


@dataclass(frozen=True, kw_only=True)
class Metric:
    name: str
    unit: str
    meaning: str
    better: Literal["lower", "higher"] = "lower"
    digits: int = 1
    ratios: bool = False


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How long to measure: rounds go on until the seconds are spent, within the bounds.

    ``keep`` picks among the combinations of the axes, beyond what the benchmark itself does.
    """

    axes: Axes
    seconds_per_case: float
    min_rounds: int
    max_rounds: int
    options: Mapping[str, Any] = field(default_factory=dict)
    keep: Callable[[Case], bool] = lambda case: True


@dataclass(kw_only=True)
class Extra:
    """What a session found beside the rounds."""

    samples: Samples = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    failed_checks: list[str] = field(default_factory=list)


class Session(Protocol):
    """One case, open for measuring. ``measure`` is one short round of one contender."""

    def measure(self, contender: str) -> Mapping[str, float]: ...

    def finish(self) -> Extra: ...

    def close(self) -> None: ...


Opener = Callable[[Case, Sequence[str], Mapping[str, Any]], Session]
Round = dict[str, dict[str, float]]


@dataclass(frozen=True, kw_only=True)
class Benchmark:
    name: str
    question: str
    contenders: Sequence[Contender]
    metrics: Sequence[Metric]
    open: Opener
    quick: Plan
    full: Plan
    targets: Sequence[Target] = ()
    keep: Callable[[Case], bool] = lambda case: True
    derive: Callable[[Round], None] = lambda measured: None

    def named(self, role: Role) -> list[str]:
        return [contender.name for contender in self.contenders if contender.role == role]
