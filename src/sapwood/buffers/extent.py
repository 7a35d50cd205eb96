"""Extents: runs of shared memory that are not used again while anybody holds or views them."""

from __future__ import annotations

import warnings
import weakref
from collections import deque
from collections.abc import Hashable
from types import TracebackType
from typing import TYPE_CHECKING, Self

from sapwood.buffers.arena import Arena
from sapwood.buffers.mapping import Bytes
from sapwood.errors import UsageError

if TYPE_CHECKING:
    from sapwood.buffers.segments import SegmentPool

__all__ = ["Block", "Extent"]


class Block:
    """The memory of an extent, shared by all who hold it. Guarded by the pool's lock."""

    __slots__ = ("arena", "asked", "handles", "nbytes", "number", "offset", "viewed")

    def __init__(self, asked: int, nbytes: int, offset: int = 0) -> None:
        self.asked = asked
        self.nbytes = nbytes
        """What it takes of the pool."""
        self.offset = offset
        self.arena: Arena | None = None
        self.number = -1
        self.handles = 0
        self.viewed: weakref.ref[Bytes] | None = None

    @property
    def idle(self) -> bool:
        """Whether nobody holds it and no view of it is left."""
        return not self.handles and (self.viewed is None or self.viewed() is None)

    def view(self, dead: deque[Block]) -> memoryview:
        """Its bytes; whoever keeps anything made from them keeps ``idle`` false.

        Every buffer made from the array keeps the array itself. A callback may run anywhere, also
        under the pool's lock, and so does nothing but note the block in ``dead``.
        """
        array = None if self.viewed is None else self.viewed()
        if array is None:
            assert self.arena is not None
            array = self.arena.bytes[self.offset : self.offset + self.asked]
            self.viewed = weakref.ref(array, lambda _: dead.append(self))
        return array.data


class Extent:
    """One hold on a run of shared memory; released once, or by leaving its ``with`` block.

    The memory is used again when every hold on it is released and no memory view, array or tensor
    made from ``view`` is left. A process that was given ``fd`` does not count: whoever passes it on
    takes a lease for it.
    """

    __slots__ = ("__weakref__", "_block", "_holder", "_pool", "_released")

    def __init__(self, pool: SegmentPool, block: Block, holder: Hashable | None) -> None:
        """The pool makes them."""
        self._pool = pool
        self._block = block
        self._holder = holder
        self._released = False

    @property
    def nbytes(self) -> int:
        """Its size as it was asked for."""
        return self._block.asked

    @property
    def offset(self) -> int:
        """Where it begins in the segment."""
        return self._block.offset

    @property
    def segment(self) -> int:
        """The number of its segment: unique in the pool, for those who keep segments mapped."""
        return self._block.number

    @property
    def fd(self) -> int:
        """The segment's descriptor, to be passed on: whoever receives it can only read."""
        return self._arena().fd

    @property
    def address(self) -> int:
        """Where it is in this process's memory; valid as long as it is held."""
        return int(self._arena().bytes.ctypes.data) + self._block.offset

    @property
    def view(self) -> memoryview:
        """Its bytes, writable. What is made from it stays valid after ``release``."""
        return self._pool._view(self)

    @property
    def released(self) -> bool:
        """Whether ``release`` was called."""
        return self._released

    def lease(self, holder: Hashable | None = None) -> Extent:
        """Another hold on the same memory, for one more user of it.

        Those of one ``holder``, such as a connection, can be ended together:
        ``SegmentPool.release_holder``.
        """
        return self._pool._lease(self, holder)

    def release(self) -> None:
        """Give up this hold.

        Raises:
            UsageError: it was released before.
        """
        self._pool._release(self)

    def _arena(self) -> Arena:
        self._check()
        assert self._block.arena is not None
        return self._block.arena

    def _check(self) -> None:
        self._pool._check()
        if self._released:
            raise UsageError(
                f"this extent of {self.nbytes} bytes was released, and may be somebody else's now: "
                "take a lease for each user, and release each once"
            )

    def __enter__(self) -> Self:
        """It is released at the end of the block."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Release it, unless that was done inside the block."""
        if not self._released:
            self.release()

    def __del__(self) -> None:
        """Nobody can release it any more."""
        if not self._released and self._pool._forget(self._block):
            warnings.warn(
                f"an extent of {self.nbytes} bytes was dropped without release()",
                ResourceWarning,
                stacklevel=2,
                source=self,
            )

    def __repr__(self) -> str:
        """Sizes and place."""
        state = "released" if self._released else f"segment {self.segment} at {self.offset}"
        return f"<Extent of {self.nbytes} bytes, {state}>"
