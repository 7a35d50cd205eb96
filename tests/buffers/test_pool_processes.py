"""A segment between processes: read-only on the other side, and gone with whoever had it."""

from __future__ import annotations

import contextlib
import mmap
import os
import signal
import socket
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from sapwood.buffers import SegmentPool, SegmentView
from sapwood.errors import StorageError, UsageError

MIB = 2**20
OWNER = """
import os, socket, sys
import numpy as np
from sapwood.buffers import SegmentPool
link = socket.socket(fileno=int(sys.argv[1]))
pool = SegmentPool(limit=64 * 2**20, headroom=16 * 2**20, label=sys.argv[2])
extent = pool.allocate(3 * 2**20)
np.frombuffer(extent.view, np.uint8)[:] = 7
lease = extent.lease("other")
socket.send_fds(link, [f"{extent.offset} {extent.nbytes}".encode()], [extent.fd])
link.recv(1)
"""
READER = """
import socket, sys
import numpy as np
from sapwood.buffers import SegmentView
link = socket.socket(fileno=int(sys.argv[1]))
text, fds, _, _ = socket.recv_fds(link, 100, 1)
offset, nbytes = map(int, text.split())
view = SegmentView(fds[0])
array = np.frombuffer(view.part(offset, nbytes), np.uint8)
link.send(b"y" if (array == 7).all() else b"n")
link.recv(1)
"""


@contextlib.contextmanager
def started(
    script: str, *arguments: str
) -> Iterator[tuple[subprocess.Popen[bytes], socket.socket]]:
    here, there = socket.socketpair()
    here.settimeout(30)
    with here, there:
        number = str(there.fileno())
        process = subprocess.Popen(
            [sys.executable, "-c", script, number, *arguments], pass_fds=[there.fileno()]
        )
        there.close()
        try:
            yield process, here
        finally:
            process.kill()
            process.wait(30)


def received(link: socket.socket) -> tuple[int, int, int]:
    text, fds, _, _ = socket.recv_fds(link, 100, 1)
    offset, nbytes = map(int, text.split())
    return fds[0], offset, nbytes


def held(label: str) -> list[str]:
    """Descriptors and mappings of such memory, in any process."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            found += [line for line in (process / "maps").read_text().splitlines() if label in line]
            for fd in (process / "fd").iterdir():
                with contextlib.suppress(OSError):
                    found += [str(fd)] if label in str(fd.readlink()) else []
    return found


def fresh() -> str:
    return f"test-{uuid.uuid4().hex}"


def test_a_killed_owner_leaves_the_reader_its_bytes_and_nothing_else() -> None:
    label = fresh()
    with started(OWNER, label) as (process, link):
        fd, offset, nbytes = received(link)
        view = SegmentView(fd)
        array = np.frombuffer(view.part(offset, nbytes), np.uint8)
        process.send_signal(signal.SIGKILL)
        process.wait(30)
        assert (array == 7).all()
        view.close()
        assert held(label)
        del array
        assert not held(label)


def test_a_killed_reader_gives_its_lease_back() -> None:
    label = fresh()
    with SegmentPool(limit=8 * MIB, label=label) as pool, started(READER) as (process, link):
        with pool.allocate(6 * MIB) as extent:
            np.frombuffer(extent.view, np.uint8)[:] = 7
            lease = extent.lease(link)
            text = f"{lease.offset} {lease.nbytes}".encode()
            socket.send_fds(link, [text], [lease.fd])
        assert link.recv(1) == b"y"
        assert pool.stats().in_use == 6 * MIB
        process.send_signal(signal.SIGKILL)
        assert link.recv(1) == b""  # what the owner sees of it
        assert pool.release_holder(link) == 1
        assert pool.stats().in_use == 0
        with pool.allocate(6 * MIB) as again:
            assert again.offset == lease.offset
    assert not held(label)


def test_both_killed_leave_nothing() -> None:
    label = fresh()
    with started(OWNER, label) as (owner, source), started(READER) as (reader, target):
        fd, offset, nbytes = received(source)
        socket.send_fds(target, [f"{offset} {nbytes}".encode()], [fd])
        os.close(fd)
        assert target.recv(1) == b"y"
        for process in (owner, reader):
            process.send_signal(signal.SIGKILL)
            process.wait(30)
    assert not held(label)


# -- writing never reaches the owner ---------------------------------------------------------


@pytest.fixture(params=["preallocated", "on_demand"])
def pool(request: pytest.FixtureRequest) -> Iterator[SegmentPool]:
    with SegmentPool(limit=16 * MIB, policy=request.param, label="test") as pool:
        yield pool


WRITES: dict[str, Callable[[int], object]] = {
    "write": lambda fd: os.pwrite(fd, b"x", 0),
    "a writable mapping": lambda fd: mmap.mmap(fd, 4096),
    "a mapping made writable later": lambda fd: make_writable(fd),
    "a hole": lambda fd: punch(fd),
    "shrinking": lambda fd: os.ftruncate(fd, 0),
    "growing": lambda fd: os.ftruncate(fd, 2**40),
    "the file opened again": lambda fd: os.pwrite(reopened(fd), b"x", 0),
}


def make_writable(fd: int) -> None:
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    memory = np.frombuffer(mmap.mmap(fd, 4096, prot=mmap.PROT_READ), np.uint8)
    if libc.mprotect(memory.ctypes.data, 4096, mmap.PROT_READ | mmap.PROT_WRITE):
        raise OSError(ctypes.get_errno(), "refused")


def punch(fd: int) -> None:
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long]
    if libc.fallocate(fd, 0x3, 0, 4096):  # FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE
        raise OSError(ctypes.get_errno(), "refused")


def reopened(fd: int) -> int:
    again = os.open(f"/proc/self/fd/{fd}", os.O_RDWR)
    REOPENED.append(again)
    return again


REOPENED: list[int] = []


@pytest.mark.parametrize("way", WRITES)
def test_a_descriptor_can_only_be_read(pool: SegmentPool, way: str) -> None:
    with pool.allocate(MIB + 1) as extent:
        extent.view[:] = b"a" * extent.nbytes
        fd = os.dup(extent.fd)
        try:
            with pytest.raises(PermissionError):
                WRITES[way](fd)
        finally:
            os.close(fd)
            while REOPENED:
                os.close(REOPENED.pop())
        assert bytes(extent.view) == b"a" * extent.nbytes
        extent.view[:] = b"b" * extent.nbytes  # its owner still writes


def test_a_view_cannot_be_written_to(pool: SegmentPool) -> None:
    with pool.allocate(100) as extent, SegmentView(os.dup(extent.fd)) as view:
        part = view.part(extent.offset, 100)
        with pytest.raises(TypeError, match="read-only"):
            part[:1] = b"x"
        array = np.frombuffer(part, np.uint8)
        with pytest.raises(ValueError):
            array[0] = 1
        with pytest.raises(ValueError):
            array.flags.writeable = True


def test_a_writable_view_writes_for_itself_alone(pool: SegmentPool) -> None:
    with pool.allocate(2 * MIB) as extent:
        extent.view[:] = b"a" * (2 * MIB)
        views = [SegmentView(os.dup(extent.fd), writable=True) for _ in range(2)]
        tensors = [
            torch.frombuffer(view.part(extent.offset, 2 * MIB), dtype=torch.uint8) for view in views
        ]
        tensors[0].fill_(1)
        assert bool((tensors[0] == 1).all())
        assert bool((tensors[1] == ord("a")).all())
        assert bytes(extent.view) == b"a" * (2 * MIB)
        for view in views:
            view.close()
        assert bool((tensors[0] == 1).all())


# -- what is passed here may be hostile ------------------------------------------------------


def unsealed() -> int:
    fd = os.memfd_create("odd", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, 4096)
    return fd


@pytest.mark.parametrize(
    "make",
    [
        unsealed,
        lambda: os.open("/dev/null", os.O_RDWR),
        lambda: os.open("/dev/zero", os.O_RDWR),
        lambda: os.pipe2(0)[0],
        lambda: os.open(sys.executable, os.O_RDONLY),
    ],
    ids=["memory that may shrink", "null", "zero", "pipe", "file"],
)
def test_what_could_be_cut_off_is_not_mapped(make: Callable[[], int]) -> None:
    fd = make()
    with pytest.raises(StorageError, match="not shared memory sealed against shrinking"):
        SegmentView(fd)
    with pytest.raises(OSError):
        os.fstat(fd)


def test_parts_end_where_the_segment_does(pool: SegmentPool) -> None:
    with pool.allocate(100) as extent, SegmentView(os.dup(extent.fd)) as view:
        assert len(view.part(view.nbytes - 5, 5)) == 5
        for offset, nbytes in ((view.nbytes - 5, 6), (-1, 1), (0, -1), (2**62, 2**62)):
            with pytest.raises(StorageError, match="were asked for of a segment of"):
                view.part(offset, nbytes)
    with pytest.raises(UsageError, match="closed"):
        view.part(0, 1)


def test_a_view_sees_what_was_added_later() -> None:
    with SegmentPool(limit=64 * MIB, label="test") as pool:
        first = pool.allocate(2 * MIB)
        with SegmentView(os.dup(first.fd)) as view:
            second = pool.allocate(20 * MIB)
            assert second.segment == first.segment
            second.view[-4:] = b"last"
            assert bytes(view.part(second.offset + second.nbytes - 4, 4)) == b"last"
        for extent in (first, second):
            extent.release()


# -- forks -----------------------------------------------------------------------------------

FORK = """
import os, sys, threading, time
import numpy as np
from sapwood.buffers import SegmentPool
from sapwood.errors import UsageError
pool = SegmentPool(limit=64 * 2**20, policy=sys.argv[1], label="fork")
extent, other = pool.allocate(2 * 2**20), pool.allocate(100)
array = np.frombuffer(extent.view, np.uint8)
array[:] = 1
pool._changed.acquire()  # as if another thread were in the middle of something
child = os.fork()
if not child:
    refused = 0
    for use in (lambda: pool.allocate(1), lambda: extent.view, extent.lease, extent.release,
                pool.stats, lambda: pool.release_holder(1), lambda: extent.fd, pool.prepare):
        try:
            use()
        except UsageError as error:
            refused += "fork" in str(error)
    seen = int(array.sum())
    array[:] = 2
    del extent, other
    pool.close()
    with SegmentPool(limit=4 * 2**20, label="child") as mine, mine.allocate(100) as own:
        own.view[:] = b"x" * 100
    os._exit(0 if refused == 8 and seen == array.size and array.sum() == 2 * seen else 1)
pool._changed.release()
_, status = os.waitpid(child, 0)
assert status == 0, status
assert (array == 1).all()
array[:] = 3
extent.release(), other.release()
del array
assert pool.stats().in_use == 0
pool.close()
"""


@pytest.mark.parametrize("policy", ["preallocated", "on_demand"])
def test_a_forked_child_neither_writes_nor_allocates(policy: str) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", FORK, policy], timeout=60, capture_output=True
    )
    assert (done.returncode, done.stderr) == (0, b"")
