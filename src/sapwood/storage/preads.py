"""Reading ranges of an open file with few system calls."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

from sapwood.errors import StorageError, Truncated
from sapwood.runtime.heartbeat import beat
from sapwood.storage.ranges import Pieces, check_within

__all__ = ["read_pieces", "read_side_by_side", "replaced"]

_BUFFERS = 1024
"""The most one system call fills."""
_BYTES = 256 * 2**20
"""The most one system call reads, so that an interrupt is not kept waiting."""
_GAP = 4096
"""Reading so much of what nobody wants is cheaper than another system call."""
_SLICE = 8 * 2**20
_SIDE_BY_SIDE = 8
Batch = tuple[int, list[memoryview]]


def read_pieces(fd: int, key: str, pieces: Pieces) -> None:
    """Fill pieces of memory from a file, many in one system call. Raises ``OSError``.

    Raises:
        Truncated: it ends before one of them does.
    """
    check_within(key, os.fstat(fd).st_size, pieces)
    for offset, buffers in _batches(pieces):
        _fill(fd, key, offset, buffers)


def read_side_by_side(open_again: Callable[[], int], key: str, pieces: Pieces) -> None:
    """The same over a network, where a single reader waits most of its time.

    Each slice is read through a descriptor of its own: some file systems read ahead per descriptor.

    Raises:
        StorageError: the object was replaced meanwhile.
    """
    slices = [
        (at + cut, out[cut : cut + _SLICE])
        for at, out in pieces
        for cut in range(0, len(out), _SLICE)
    ]
    heaps = [slices[n::_SIDE_BY_SIDE] for n in range(min(_SIDE_BY_SIDE, len(slices)))]
    if len(heaps) < 2 or sum(len(out) for _, out in slices) <= _SLICE:
        heaps = [list(pieces)]
    with ThreadPoolExecutor(len(heaps), thread_name_prefix="sapwood-read") as pool:
        jobs = [pool.submit(_read_alone, open_again, key, heap) for heap in heaps]
        if len({job.result() for job in jobs}) > 1:
            raise replaced(key)


def _read_alone(open_again: Callable[[], int], key: str, pieces: Pieces) -> tuple[int, int]:
    """Read some of them; which file it was."""
    fd = open_again()
    try:
        read_pieces(fd, key, pieces)
        status = os.fstat(fd)
        return status.st_dev, status.st_ino
    finally:
        os.close(fd)


def replaced(key: str) -> StorageError:
    """For whoever got some bytes of one object and some of another."""
    return StorageError(f"{key} was replaced while it was read; read it again")


def _batches(pieces: Pieces) -> Iterator[Batch]:
    """Pieces that follow each other closely, with memory for the gaps between them."""
    offset, end, buffers = 0, -1, list[memoryview]()
    for at, out in sorted(((a, o) for a, o in pieces if len(o)), key=lambda piece: piece[0]):
        gap = at - end
        near = 0 <= gap <= min(_GAP, (end - offset) // 10)
        if buffers and near and len(buffers) < _BUFFERS - 1 and end - offset < _BYTES:
            if gap:
                buffers.append(memoryview(bytearray(gap)))
            buffers.append(out)
        else:
            if buffers:
                yield offset, buffers
            offset, buffers = at, [out]
        end = at + len(out)
    if buffers:
        yield offset, buffers


def _fill(fd: int, key: str, offset: int, buffers: list[memoryview]) -> None:
    while buffers:
        count = os.preadv(fd, buffers, offset)
        beat()
        if not count:
            raise Truncated(f"{key} ends at byte {offset}; it was made shorter just now")
        offset += count
        while buffers and count >= len(buffers[0]):
            count -= len(buffers.pop(0))
        if count:
            buffers[0] = buffers[0][count:]
