"""Make something go wrong at a named point, for the length of a ``with`` block.

    with faults.inject("sync.before_update", "raise", at=3):
        train()

The points themselves are in production code and call ``sapwood.runtime.faults.point``. For a rank
of ``sapwood.testing.ranks`` use ``inject`` inside the rank, or give it ``env=faults.env(...)``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from sapwood.runtime import faults as _faults
from sapwood.runtime.faults import Action, Fault, InjectedError, armed, disarm_all

__all__ = ["Fault", "InjectedError", "armed", "disarm_all", "env", "inject"]


@contextmanager
def inject(
    name: str, action: Action, *, at: int | None = 1, when: Callable[..., bool] | None = None
) -> Iterator[Fault]:
    """Arm the point ``name`` inside the block; see ``sapwood.runtime.faults.arm``.

    The fault it gives counts the passages in ``seen``, so a test can tell that its point was
    reached at all.
    """
    fault = _faults.arm(name, action, at=at, when=when)
    try:
        yield fault
    finally:
        _faults.disarm(fault)


def env(*entries: str) -> dict[str, str]:
    """The environment that arms points in another process; a mistake is raised here, not there."""
    text = ";".join(entries)
    _faults.parse(text)
    return {_faults.ENV: text}
