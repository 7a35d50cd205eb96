"""Counts page faults: what memory costs that was not faulted in before it was needed."""

from __future__ import annotations

import resource
from types import TracebackType
from typing import Self

__all__ = ["FaultCount"]


class FaultCount:
    """Faults of the calling thread, or of the whole process, inside a ``with`` block.

    with FaultCount() as faults:
        ...
    faults.minor
    """

    def __init__(self, *, process: bool = False) -> None:
        """A thread's own count leaves out what grows in the background meanwhile."""
        self.minor = 0
        """Pages that the kernel had to allocate or map."""
        self.major = 0
        """Pages that were read from a device."""
        self._who = resource.RUSAGE_SELF if process else resource.RUSAGE_THREAD

    def __enter__(self) -> Self:
        """Begin to count."""
        self._before = resource.getrusage(self._who)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Stop counting."""
        after = resource.getrusage(self._who)
        self.minor = after.ru_minflt - self._before.ru_minflt
        self.major = after.ru_majflt - self._before.ru_majflt
