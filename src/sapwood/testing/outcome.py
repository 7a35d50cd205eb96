"""What a rank came to, and how it is told."""

from __future__ import annotations

import signal as signals
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from sapwood.errors import RankError

__all__ = ["Outcome"]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How one rank ended: with a value, with an exception, by a signal, or by leaving.

    ``error`` is the full traceback as text and ``error_type`` the name of the exception's class
    (``FenceTimeout``); ``ended`` orders the outcomes of a group in time.
    """

    rank: int
    value: Any = None
    error: str | None = None
    error_type: str | None = None
    signal: signals.Signals | None = None
    exit_code: int | None = None
    stacks: str = ""
    ended: float = field(default=0.0, compare=False)

    @property
    def ok(self) -> bool:
        """Whether the function returned and the process then ended by itself."""
        return self.error is None and self.signal is None and self.exit_code is None

    def describe(self) -> str:
        """What happened, with the traceback if there is one."""
        if self.error is not None:
            return f"rank {self.rank} raised {self.error_type}:\n{self.error.rstrip()}"
        if self.signal is not None:
            stacks = f"\n{self.stacks.rstrip()}" if self.stacks else ""
            return f"rank {self.rank} was killed by {self.signal.name}{stacks}"
        if self.exit_code is not None:
            return f"rank {self.rank} left with exit code {self.exit_code} and returned nothing"
        return f"rank {self.rank} returned {self.value!r}"


def failure(outcomes: Sequence[Outcome]) -> RankError | None:
    """The error that tells of every failed rank, the first to fail first; None if all are well."""
    failed = sorted((one for one in outcomes if not one.ok), key=lambda one: one.ended)
    if not failed:
        return None
    head = f"{len(failed)} of {len(outcomes)} ranks failed; first: rank {failed[0].rank}"
    return RankError("\n\n".join([head, *(one.describe() for one in failed)]), rank=failed[0].rank)
