"""The two ways a pool comes by memory: prepared before it is needed, or made for each extent."""

from __future__ import annotations

import time
from bisect import bisect_right
from typing import NamedTuple, Protocol

from sapwood.buffers.available import available_memory
from sapwood.buffers.extent import Block
from sapwood.buffers.freespace import FreeSpace
from sapwood.buffers.layout import alignment_of, footprint
from sapwood.buffers.mapping import HUGE_PAGE, PAGE, round_up
from sapwood.buffers.segment import Segment
from sapwood.errors import NoRoom, StorageError

__all__ = ["Growth", "OnDemand", "Policy", "Preallocated", "show"]

_GAP = HUGE_PAGE
"""Between segments in the pool's addresses: runs of two are never joined."""
_SPARED = 64 * 2**20
"""Left to the machine, which would kill a process rather than refuse the last pages."""


class Growth(NamedTuple):
    """More pages for a segment; None is a new one."""

    segment: int | None
    nbytes: int
    room: int = 0
    """The addresses of a new one: it may be grown in several steps."""


class Policy(Protocol):
    """Where a pool's memory comes from. ``make``, ``let_go`` and ``carry_out`` need no lock."""

    @property
    def reserved(self) -> int:
        """Bytes of memory that are the pool's."""
        ...

    @property
    def segments(self) -> int:
        """How many there are."""
        ...

    @property
    def largest(self) -> int:
        """The longest extent there is room for without growing."""
        ...

    @property
    def huge(self) -> int:
        """How much of it is in huge pages."""
        ...

    @property
    def seconds(self) -> float:
        """What making memory took."""
        ...

    def take(self, nbytes: int) -> Block | None:
        """Room for so many bytes; None if there is none."""
        ...

    def make(self, block: Block) -> None:
        """Memory for what was taken."""
        ...

    def give_back(self, block: Block) -> None:
        """The room may be taken again."""
        ...

    def let_go(self, block: Block) -> None:
        """Give the memory of what was given back to the system, if it is not kept."""
        ...

    def plan(self, nbytes: int, *, joined: bool = True) -> Growth | None:
        """What gives a run of ``nbytes``, or so much more; None if that is over the limit."""
        ...

    def carry_out(self, growth: Growth) -> Segment:
        """Do what was planned; only one thread at a time may."""
        ...

    def account(self, growth: Growth, segment: Segment) -> None:
        """What was carried out may be taken."""
        ...

    def arenas(self) -> list[Segment]:
        """All of its memory."""
        ...


class Preallocated:
    """Segments that are kept, grown and faulted in ahead, and divided by ``FreeSpace``."""

    def __init__(self, *, limit: int, segment_bytes: int, huge: bool, label: str) -> None:
        self._limit, self._label = limit, label
        self._segment_bytes = round_up(segment_bytes, HUGE_PAGE)
        self._wants_huge = huge
        self._space = FreeSpace()
        self._segments: list[Segment] = []
        self._bases: list[int] = []
        self.reserved = 0
        self.huge = 0
        self.seconds = 0.0

    @property
    def segments(self) -> int:
        return len(self._segments)

    @property
    def largest(self) -> int:
        return self._space.largest

    def take(self, nbytes: int) -> Block | None:
        size = footprint(nbytes)
        start = self._space.take(size, alignment_of(nbytes))
        if start is None:
            return None
        number = bisect_right(self._bases, start) - 1
        block = Block(nbytes, size, start - self._bases[number])
        block.arena, block.number = self._segments[number], number
        return block

    def make(self, block: Block) -> None:
        """It was made before."""

    def give_back(self, block: Block) -> None:
        self._space.add(self._bases[block.number] + block.offset, block.nbytes)

    def let_go(self, block: Block) -> None:
        """It is kept, for the next one."""

    def plan(self, nbytes: int, *, joined: bool = True) -> Growth | None:
        whole = round_up(nbytes, HUGE_PAGE)
        best = Growth(None, whole, max(self._segment_bytes, whole))
        for number, (base, segment) in enumerate(zip(self._bases, self._segments, strict=True)):
            missing = whole
            if joined:
                begin = segment.ready - self._space.ending_at(base + segment.ready)
                missing = round_up(round_up(begin, PAGE) + nbytes - segment.ready, HUGE_PAGE)
            if missing <= segment.nbytes - segment.ready and missing <= best.nbytes:
                best = Growth(number, missing)
        return best if best.nbytes <= self._limit - self.reserved else None

    def carry_out(self, growth: Growth) -> Segment:
        began = time.monotonic()
        room = available_memory() - _SPARED
        if growth.nbytes > room:
            raise NoRoom(
                f"the machine, or the container, has {show(max(room, 0))} of memory left, and "
                f"{show(growth.nbytes)} more are needed"
            )
        try:
            if growth.segment is None:
                segment = Segment(growth.room, label=self._label)
            else:
                segment = self._segments[growth.segment]
            segment.grow(growth.nbytes, huge=self._wants_huge)
        except StorageError:
            raise
        except OSError as error:
            raise NoRoom(f"the system gave no memory: {error.strerror or error}") from error
        finally:
            self.seconds += time.monotonic() - began
        return segment

    def account(self, growth: Growth, segment: Segment) -> None:
        if growth.segment is None:
            end = self._bases[-1] + self._segments[-1].nbytes + _GAP if self._segments else 0
            self._segments.append(segment)
            self._bases.append(end)
        number = growth.segment if growth.segment is not None else -1
        end = self._bases[number] + segment.ready
        self._space.add(end - growth.nbytes, growth.nbytes)
        self.reserved += growth.nbytes
        self.huge = sum(one.huge for one in self._segments)

    def arenas(self) -> list[Segment]:
        return list(self._segments)


class OnDemand:
    """Memory of its own for each extent, given back with it: what preparing is compared with."""

    huge = 0

    def __init__(self, *, limit: int, label: str) -> None:
        self._limit, self._label = limit, label
        self._made: dict[int, Segment] = {}
        self._count = 0
        self.reserved = 0
        self.seconds = 0.0

    @property
    def segments(self) -> int:
        return len(self._made)

    @property
    def largest(self) -> int:
        return self._limit - self.reserved

    def take(self, nbytes: int) -> Block | None:
        size = footprint(nbytes)
        if self.reserved + size > self._limit:
            return None
        self.reserved += size
        block = Block(nbytes, size)
        block.number, self._count = self._count, self._count + 1
        return block

    def make(self, block: Block) -> None:
        began = time.monotonic()
        try:
            block.arena = self._made[block.number] = Segment(block.nbytes, label=self._label)
        except StorageError:
            raise
        except OSError as error:
            raise NoRoom(f"the system gave no memory: {error.strerror or error}") from error
        finally:
            self.seconds += time.monotonic() - began

    def give_back(self, block: Block) -> None:
        self.reserved -= block.nbytes

    def let_go(self, block: Block) -> None:
        arena = self._made.pop(block.number, None)
        if arena is not None:
            arena.close()
        block.arena = None

    def plan(self, nbytes: int, *, joined: bool = True) -> Growth | None:
        return None

    def carry_out(self, growth: Growth) -> Segment:
        raise AssertionError("memory that is made on demand does not grow")

    def account(self, growth: Growth, segment: Segment) -> None:
        """Nothing grew."""

    def arenas(self) -> list[Segment]:
        return list(self._made.values())


def show(nbytes: int) -> str:
    """A size for people."""
    if nbytes < 1024:
        return f"{nbytes} bytes"
    power = min((nbytes.bit_length() - 1) // 10, 4)
    return f"{nbytes / 1024**power:.1f} {'KMGT'[power - 1]}iB"
