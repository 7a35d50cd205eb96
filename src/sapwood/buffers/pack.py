"""The memory of one save: all of its tensors, in one extent if there is a run that long."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from types import TracebackType
from typing import Self

from sapwood.buffers.extent import Extent

__all__ = ["Pack"]


class Pack:
    """Places for tensors, by number, in extents that are released together."""

    def __init__(
        self, extents: Sequence[Extent], offsets: Sequence[list[int]], sizes: Sequence[int]
    ) -> None:
        """``offsets[n]`` are those of the tensors in ``extents[n]``; all are in order."""
        self.extents = tuple(extents)
        self.offsets = tuple(offsets)
        """For each extent, where tensors begin in it."""
        self.sizes = tuple(sizes)
        self._firsts = [0, *accumulate(map(len, offsets))][:-1]

    @property
    def nbytes(self) -> int:
        """Of all extents, with what is between tensors."""
        return sum(extent.nbytes for extent in self.extents)

    def where(self, number: int) -> tuple[Extent, int]:
        """The extent that holds a tensor, and where the tensor begins in it."""
        part = bisect_right(self._firsts, number) - 1
        return self.extents[part], self.offsets[part][number - self._firsts[part]]

    def view(self, number: int) -> memoryview:
        """The bytes of one tensor, writable."""
        extent, offset = self.where(number)
        return extent.view[offset : offset + self.sizes[number]]

    def release(self) -> None:
        """Release all extents; the first error is raised when all were tried."""
        errors: list[Exception] = []
        for extent in self.extents:
            try:
                extent.release()
            except Exception as error:
                errors.append(error)
        if errors:
            raise errors[0]

    def __enter__(self) -> Self:
        """It is released at the end of the block."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Release what was not released inside the block."""
        for extent in self.extents:
            extent.__exit__(kind, error, trace)
