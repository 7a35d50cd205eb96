"""What a fork cost its donors."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["ForkReport"]


@dataclass(slots=True, kw_only=True)
class ForkReport:
    """What one fork cost this donor."""

    session: str
    clones: int
    approach: str
    step: int = 0
    """The step whose state was sent; 0 while it is not known."""
    nbytes: int = 0
    send_seconds: float = 0.0
    """From the first message to the last."""
    waited_seconds: float = 0.0
    """What updates waited for it."""
    failure: str = ""
    ready: bool = False
    """The clones can receive; on rank 0, which decides the step."""
    sent: bool = False
    """The clones have been given all they need, and it is up to them when they begin."""
    done: bool = False
    """All clones have begun."""
