"""Signs of life of slow work: when this process last got any byte anywhere.

Writing a checkpoint may take an hour and be well, or hang for ever at a file system that is gone.
What tells them apart is whether single operations still come to an end.
"""

from __future__ import annotations

import time

__all__ = ["beat", "silence"]

_last = time.monotonic()


def beat() -> None:
    """An operation has begun, or come to its end."""
    global _last
    _last = time.monotonic()


def silence() -> float:
    """Seconds since the last sign of life, on any thread."""
    return time.monotonic() - _last
