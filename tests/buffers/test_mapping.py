"""Mappings: huge pages where there may be some, one lifetime, and forked children."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from sapwood.buffers import Arena, FaultCount, available
from sapwood.buffers.mapping import HUGE_PAGE, Access, Mapping

MIB = 2**20


def memory(nbytes: int) -> int:
    fd = os.memfd_create("sapwood-mapping-test")
    os.ftruncate(fd, nbytes)
    return fd


def mapped() -> int:
    return Path("/proc/self/maps").read_text().count("sapwood-mapping-test")


def test_it_begins_on_a_huge_page_and_ends_with_its_last_array() -> None:
    fd = memory(3 * MIB)
    try:
        one = Mapping(fd, 3 * MIB)
        assert one.address % HUGE_PAGE == 0
        assert one.bytes.ctypes.data == one.address
        kept = one.bytes[5:10]
        kept[:] = 9
        del one
        assert mapped() == 1
        assert os.pread(fd, 5, 5) == b"\t" * 5
        other = Mapping(fd, 3 * MIB, Access.READ).bytes
        assert mapped() == 2
        assert other[5] == 9
        del kept, other
        assert mapped() == 0
    finally:
        os.close(fd)


@pytest.mark.parametrize("huge", [True, False])
@pytest.mark.parametrize("nbytes", [1, 4096, 2 * MIB, 5 * MIB + 1])
def test_what_was_faulted_in_does_not_fault(nbytes: int, huge: bool) -> None:
    fd = memory(nbytes)
    try:
        one = Mapping(fd, nbytes)
        found = one.fault_in(fd, 0, nbytes, huge=huge)
        assert found <= (nbytes // HUGE_PAGE * HUGE_PAGE if huge else 0)
        assert os.fstat(fd).st_blocks * 512 >= nbytes
        assert not one.bytes.any()
        ones = np.ones(nbytes, np.uint8)
        with FaultCount() as faults:
            one.bytes[:] = ones
        assert faults.minor < 50
    finally:
        os.close(fd)


def test_without_huge_pages_there_are_small_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Mapping, "_collapse", lambda *_: False)
    arena = Arena(4 * MIB)
    with FaultCount() as faults:
        arena.bytes[:] = 1
    assert faults.minor < 50
    arena.close()


def test_memory_that_is_not_there_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Mapping, "_collapse", lambda *_: False)
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match="No space left"):
        Arena(4 * MIB, label="refused")
    assert "sapwood-refused" not in Path("/proc/self/maps").read_text()


def test_what_cannot_be_mapped_is_an_error() -> None:
    with pytest.raises(OSError, match="Bad file descriptor"):
        Mapping(10**6, 4096)
    read, write = os.pipe()
    with pytest.raises(OSError):
        Mapping(read, 4096)
    os.close(read)
    os.close(write)


CHILD = """
import ctypes, mmap, os, sys
from sapwood.buffers import Arena
arena = Arena(8 * 2**20)
arena.keep_from_children()
address, length = arena.bytes.ctypes.data, arena.nbytes
libc = ctypes.CDLL(None)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
child = os.fork()
if not child:
    # Anything may be put there by now: a thread's stack, a library, memory of malloc.
    fixed = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x100000
    assert libc.mmap(address, length, 3, fixed, -1, 0) == address
    ctypes.memset(address, 5, length)
    arena.close()
    del arena
    os._exit(0 if ctypes.string_at(address, 3) == b"\\5" * 3 else 1)
_, status = os.waitpid(child, 0)
assert status == 0, status
arena.close()
"""


def test_a_child_does_not_unmap_what_is_where_the_memory_was() -> None:
    done = subprocess.run([sys.executable, "-c", CHILD], timeout=60, capture_output=True)
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"meminfo": "MemTotal: 900 kB\nMemAvailable: 100 kB\n"}, 102400),
        ({"meminfo": "MemAvailable: 100 kB\n", "memory.max": "max"}, 102400),
        (
            {"meminfo": "MemAvailable: 100 kB\n", "memory.max": "5000", "memory.current": "4000"},
            1000,
        ),
        (
            {
                "meminfo": "MemAvailable: 100 kB\n",
                "memory.max": "5000",
                "memory.current": "4900",
                "memory.stat": "anon 7\ninactive_file 300\n",
            },
            400,
        ),
        ({"meminfo": "MemAvailable: 1 kB\n", "memory.max": "5000", "memory.current": "9"}, 1024),
        ({}, 2**72),
    ],
)
def test_the_memory_that_can_be_had(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, str], expected: int
) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(available, "_MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(available, "_CGROUP", tmp_path)
    assert available.available_memory() == expected


def test_an_arena_of_nothing_is_not_attached() -> None:
    with pytest.raises(ValueError, match="empty"):
        Arena.attach(memory(0))
