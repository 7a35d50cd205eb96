"""What ``sapwood fork`` tells the ranks it starts: whom to ask, and what shall be different."""

from __future__ import annotations

import difflib
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from sapwood.clone.door import Address
from sapwood.errors import CloneError, ConfigError

__all__ = ["ENV", "ForkOrder", "ForkedFrom", "check_overrides", "parse_overrides", "read_order"]

ENV = "SAPWOOD_FORK"
_OPTIMIZER = "optimizer"
_ALIKE = 0.85
_WORDS = ("adjust_lr_fn", "line_search_fn")
"""The options of torch's optimizers that are text; all others are numbers, or true or false."""
_NOT_NEGATIVE = ("eps", "lr", "momentum", "weight_decay")


@dataclass(frozen=True, slots=True, kw_only=True)
class ForkedFrom:
    """Where a run came from."""

    run: str
    """The parent's id."""
    step: int
    """The step after which the two go their own ways."""
    overrides: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class ForkOrder:
    """A fork to be made."""

    address: Address
    overrides: Mapping[str, Any] = field(default_factory=dict)
    approach: str = ""
    """What the run is set to, if empty."""
    transport: str = ""
    standby: bool = False
    """Get ready, and wait until the run says so."""
    at_step: int | None = None
    """Begin with the state after this step; None: after the next one that can be had."""
    together: tuple[str, int] | None = None
    """A name, and how many forks have it: all begin with the state of the same step."""

    @property
    def waits(self) -> bool:
        """Whether the step to begin with may be far away."""
        return self.standby or self.at_step is not None

    def encode(self) -> str:
        """For the environment."""
        return json.dumps(asdict(self))


def read_order() -> ForkOrder | None:
    """The order in the environment, if there is one.

    Raises:
        CloneError: it is not what ``sapwood fork`` writes.
    """
    text = os.environ.get(ENV)
    if not text:
        return None
    try:
        fields = json.loads(text)
        together = fields.get("together")
        fields["together"] = None if together is None else (str(together[0]), int(together[1]))
        return ForkOrder(**{**fields, "address": Address(**fields["address"])})
    except (ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
        raise CloneError(f"{ENV} is set, but not by `sapwood fork`: {error}") from error


def parse_overrides(texts: Sequence[str], option: str = "--set") -> dict[str, Any]:
    """``optimizer.lr=0.01`` and the like, by path; values are JSON where they can be.

    Raises:
        ConfigError: one has no ``=``, or no path, or a path is given twice; ``option`` names it.
    """
    found: dict[str, Any] = {}
    for text in texts:
        path, equals, value = text.partition("=")
        if not equals or not path.strip():
            raise ConfigError(
                f"{option} {text!r}: expected a path and a value, as in optimizer.lr=0.1"
            )
        if path.strip() in found:
            raise ConfigError(f"{option} {path.strip()} is given twice; give it once")
        try:
            found[path.strip()] = json.loads(value)
        except ValueError:
            found[path.strip()] = value
    return found


def check_overrides(overrides: Mapping[str, Any]) -> None:
    """Refuse what no optimizer of torch takes, before anything is started for it.

    What depends on the run's own optimizer is found out when the state is there. Paths that are the
    script's are not looked at, unless they are likely a slip.

    Raises:
        ConfigError: a path is misspelt, or a value cannot be meant.
    """
    for path, value in overrides.items():
        first, *rest = path.split(".")
        if first != _OPTIMIZER:
            if difflib.SequenceMatcher(None, first.lower(), _OPTIMIZER).ratio() >= _ALIKE:
                fixed = ".".join([_OPTIMIZER, *rest])
                raise ConfigError(f"{path}: did you mean {fixed}?")
            continue
        if len(rest) == 2 and rest[0].isdecimal():
            rest = rest[1:]
        if len(rest) != 1 or not rest[0] or rest[0] == "params":
            raise ConfigError(
                f"{path}: expected {_OPTIMIZER}.NAME for all parameter groups, or "
                f"{_OPTIMIZER}.0.NAME for one"
            )
        _check_value(path, rest[0], value)


def _check_value(path: str, name: str, value: Any) -> None:
    if isinstance(value, str) and name in _WORDS:
        return
    numbers = value if isinstance(value, list) else [value]
    plain = all(one is None or isinstance(one, (bool, int, float)) for one in numbers)
    if not plain or any(isinstance(one, float) and not math.isfinite(one) for one in numbers):
        raise ConfigError(f"{path} is {value!r}, expected a number")
    if name in _NOT_NEGATIVE and (isinstance(value, (bool, list)) or value is None or value < 0):
        raise ConfigError(f"{path} is {value!r}, expected a number, 0 or more")
    if name == "betas" and (len(numbers) != 2 or not all(_is_share(one) for one in numbers)):
        raise ConfigError(f"{path} is {value!r}, expected two numbers below 1, as in [0.9,0.99]")


def _is_share(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < 1
