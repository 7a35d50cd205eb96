"""What ``sapwood fork`` tells the ranks it starts: whom to ask, and what shall be different."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from sapwood.clone.address import Address
from sapwood.errors import CloneError, ConfigError

__all__ = [
    "ENV",
    "ForkOrder",
    "ForkedFrom",
    "order_failed",
    "order_used",
    "parse_overrides",
    "read_order",
    "used_by",
]

ENV = "SAPWOOD_FORK"


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


@dataclass(slots=True)
class _Use:
    """What became of this process's order."""

    text: str = ""
    run: str = ""


_use = _Use()


def order_used(run: str) -> None:
    """The order became the run of this id: no later Run forks again, nor one of a child process."""
    _use.text, _use.run = os.environ.get(ENV, ""), run
    os.environ[ENV] = ""  # not removed: whoever has set it removes it


def order_failed() -> None:
    """The run that it became never began: the next Run tries again, and does not start fresh."""
    if _use.text:
        os.environ[ENV] = _use.text
        _use.text = _use.run = ""


def used_by() -> str:
    """The id of the run that this process's order became; empty if there was none."""
    return _use.run


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
