"""Writing files: whatever lies where in memory and in the file, the bytes arrive."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sapwood.buffers import Arena
from sapwood.storage.files import DIRECT_BYTES, PAGE, Files


@pytest.fixture
def arena() -> Arena:
    made = Arena(DIRECT_BYTES * 3)
    made.bytes[:] = np.random.default_rng(0).integers(0, 256, made.nbytes, np.uint8)
    return made


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    at=st.integers(0, 2 * PAGE),
    shift=st.sampled_from([0, 0, PAGE, 4, 513]),
    nbytes=st.integers(DIRECT_BYTES - 2 * PAGE, DIRECT_BYTES * 2),
)
def test_any_place_and_size(tmp_path: Path, arena: Arena, at: int, shift: int, nbytes: int) -> None:
    """``shift`` 0 or a page: memory and file lie alike, and whole pages can go direct."""
    path, offset = tmp_path / "file", at + shift
    data = memoryview(arena.bytes)[at : at + nbytes]
    with Files().create(path) as writer:
        writer.write_at(0, b"\xff" * (offset + nbytes + 10))
        writer.write_at(offset, data)
        writer.sync()
    content = path.read_bytes()
    assert content[offset : offset + nbytes] == bytes(data)
    rest = content[:offset] + content[offset + nbytes :]
    assert rest == b"\xff" * (offset + 10)


def flags_of_writes(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each coming write is direct."""
    direct = []
    real = os.pwrite

    def pwrite(fd: int, data: memoryview, offset: int) -> int:
        direct.append(bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT))
        return real(fd, data, offset)

    monkeypatch.setattr(os, "pwrite", pwrite)
    return direct


def test_whole_pages_go_past_the_page_cache(
    tmp_path: Path, arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    direct = flags_of_writes(monkeypatch)
    with Files().create(tmp_path / "file") as writer:
        try:
            fcntl.fcntl(writer._fd, fcntl.F_SETFL, os.O_DIRECT)
        except OSError:
            pytest.skip("this file system has no direct I/O")
        fcntl.fcntl(writer._fd, fcntl.F_SETFL, 0)
        writer.write_at(100, memoryview(arena.bytes)[100 : 100 + 2 * DIRECT_BYTES])
    assert direct == [False, True, False]


def test_a_file_system_without_direct_writes_is_asked_once(
    tmp_path: Path, arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    real = fcntl.fcntl

    def refuse(fd: int, command: int, argument: int = 0) -> int:
        if command == fcntl.F_SETFL and argument & os.O_DIRECT:
            asked.append(fd)
            raise OSError(errno.EINVAL, "no direct I/O here")
        return real(fd, command, argument)

    monkeypatch.setattr(fcntl, "fcntl", refuse)
    with Files().create(tmp_path / "file") as writer:
        for offset in (0, arena.nbytes):
            writer.write_at(offset, arena.bytes)
    assert len(asked) == 1
    assert (tmp_path / "file").read_bytes() == bytes(arena.bytes) * 2


def test_a_full_disk_is_an_error_also_for_direct_writes(
    tmp_path: Path, arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.pwrite

    def full(fd: int, data: memoryview, offset: int) -> int:
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.ENOSPC, "no space left")
        return real(fd, data, offset)

    with Files().create(tmp_path / "file") as writer:
        monkeypatch.setattr(os, "pwrite", full)
        with pytest.raises(OSError, match="no space"):
            writer.write_at(0, arena.bytes)
        assert not fcntl.fcntl(writer._fd, fcntl.F_GETFL) & os.O_DIRECT
