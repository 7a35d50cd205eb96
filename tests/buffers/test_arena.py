"""Shared memory without a name: what forks and other holders of it cannot do."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from sapwood.buffers.arena import Arena

MIB = 2**20


def in_maps(label: str) -> str:
    """What the kernel says of a mapping of this process."""
    _, _, rest = Path("/proc/self/smaps").read_text().partition(f"memfd:sapwood-{label}")
    return rest.partition("VmFlags:")[0] + rest.partition("VmFlags:")[2].partition("\n")[0]


def test_nobody_can_shrink_it_under_another() -> None:
    arena = Arena(MIB)
    with pytest.raises(PermissionError):
        os.ftruncate(arena.fd, 1)
    arena.write_at(MIB, b"more")  # it may grow
    assert os.fstat(arena.fd).st_size == MIB + 4
    arena.close()


def test_a_forked_process_does_not_map_what_neighbours_read() -> None:
    arena = Arena(MIB, label="test-dontfork")
    assert "dc" not in in_maps("test-dontfork").split()
    arena.keep_from_children()
    assert "dc" in in_maps("test-dontfork").split()
    arena.close()


def test_pages_are_left_to_whoever_writes_them_first() -> None:
    """So that they are on that one's NUMA node."""
    touched, left = Arena(MIB, label="test-touched"), Arena(MIB, label="test-left", touch=False)
    blocks = [os.fstat(arena.fd).st_blocks * 512 for arena in (touched, left)]
    assert blocks[0] >= MIB
    assert blocks[1] == 0
    for arena in (touched, left):
        arena.close()
