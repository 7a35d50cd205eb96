"""Averagers on real ranks and machines: the right bits, the same on all ranks."""

from __future__ import annotations

import hashlib
import socket
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from sapwood.errors import UsageError
from sapwood.testing import ranks
from tests.marks import needs_machines
from tests.sync.averaging.harness import TYPES, ByHand, Sizes, averaging, given

LENGTHS = (1, 0, 2, 5, 17, 1000, 40_000)
LAYOUTS: list[Sizes] = [
    [(length, dtype) for dtype in TYPES for length in LENGTHS],
    [(3, torch.float64), (2, torch.float32)],
    [(100 + n, TYPES[n % 4]) for n in range(30)],
]


def go_round(group: Any, averager: Any, memory: Any, sizes: Sizes, turn: int) -> list[Any]:
    pending = []
    for bucket, (length, dtype) in enumerate(sizes):
        memory[bucket].contribution.copy_(given(group.rank, bucket, turn, length, dtype))
        pending.append(averager.launch(bucket, f"bucket {bucket}"))
    for one in pending:
        one.wait()
    return [one.average.clone() for one in memory]


def descriptors(*kinds: str) -> list[str]:
    """What this process holds open of these kinds."""
    found = []
    for one in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):
            shown = str(one.readlink())
            found += [shown for kind in kinds if kind in shown]
    return found


def local_sockets() -> int:
    """How many Unix sockets this process holds; gloo's own are not, and end when they like."""
    known = {line.split()[6] for line in Path("/proc/self/net/unix").read_text().splitlines()[1:]}
    return sum(text.removeprefix("socket:[")[:-1] in known for text in descriptors("socket:["))


def sums(places: list[list[int]]) -> dict[str, Any]:
    """Several layouts and rounds against sums made by hand."""
    facts: dict[str, Any] = {"wrong": [], "digests": []}
    with averaging() as (group, chosen):
        facts["machines"] = str(chosen.machines)
        facts["neighbours"] = len(chosen.machines.of_rank(group.rank)) - 1
        reference = ByHand(places, group.rank)
        for number, sizes in enumerate(LAYOUTS):
            memory = chosen.averager.lay_out(sizes)
            for turn in range(1, 3):
                averages = go_round(group, chosen.averager, memory, sizes, turn)
                digest = hashlib.blake2b(digest_size=8)
                for bucket, (length, dtype) in enumerate(sizes):
                    digest.update(averages[bucket].view(torch.uint8).numpy().tobytes())
                    expected = reference.sum(bucket, turn, length, dtype)
                    if expected is not None and not torch.equal(averages[bucket], expected):
                        facts["wrong"].append((number, turn, bucket, length, str(dtype)))
                facts["digests"].append(digest.hexdigest())
        facts["open"] = len(descriptors("memfd:sapwood-"))
        shared = {m.contribution.data_ptr() != m.average.data_ptr() for m in memory}
        assert shared == {True}
        assert all(m.shared for m in memory)
    return facts


def check(found: list[dict[str, Any]], shown: str) -> None:
    for facts in found:
        assert facts["wrong"] == []
        assert facts["digests"] == found[0]["digests"]
        assert facts["machines"] == shown
        # One of each neighbour, one's own and the average: those of earlier layouts are given back.
        assert facts["open"] == facts["neighbours"] + 2


def places_of(sizes: list[int]) -> list[list[int]]:
    numbers = iter(range(sum(sizes)))
    return [[next(numbers) for _ in range(size)] for size in sizes]


@pytest.mark.parametrize(("world", "shown"), [(2, "0-1"), (3, "0-2"), (4, "0-3")])
def test_sums_on_one_machine(world: int, shown: str) -> None:
    check(ranks.spawn(sums, world, places_of([world])), f"1 machine: {shown}")


@needs_machines
@pytest.mark.parametrize(
    ("sizes", "shown"),
    [
        ([2, 1], "2 machines: 0-1 | 2"),
        ([1, 2], "2 machines: 0 | 1-2"),
        ([2, 2], "2 machines: 0-1 | 2-3"),
        ([3, 1], "2 machines: 0-2 | 3"),
        ([1, 1, 2], "3 machines: 0 | 1 | 2-3"),
    ],
)
def test_sums_over_machines(sizes: list[int], shown: str) -> None:
    check(ranks.spawn(sums, sum(sizes), places_of(sizes), machines=sizes), shown)


def many_with_small_connections() -> bool:
    """Far more buckets on their way than connections hold messages."""
    sizes: Sizes = [(3, torch.float32)] * 600
    with averaging(timeout=20.0) as (group, chosen):
        averager: Any = chosen.averager
        for _, link in averager._neighbours._links:
            link.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
        memory = averager.lay_out(sizes)
        good = True
        for turn in range(1, 4):
            averages = go_round(group, averager, memory, sizes, turn)
            for bucket, (length, dtype) in enumerate(sizes):
                parts = [given(r, bucket, turn, length, dtype) for r in range(2)]
                good &= torch.equal(averages[bucket], parts[0] + parts[1])
        return good


def test_more_messages_than_a_connection_holds() -> None:
    assert ranks.spawn(many_with_small_connections, 2) == [True, True]


def launch_order() -> tuple[bool, str]:
    """Sums follow the order of launches, which is not that of numbers; a bucket flies once."""
    sizes: Sizes = [(64, torch.float32)] * 4
    with averaging() as (group, chosen):
        averager = chosen.averager
        memory = averager.lay_out(sizes)
        pending = []
        for turn, order in enumerate(([3, 1, 0, 2], [0, 1, 2, 3]), 1):
            for bucket in order:
                memory[bucket].contribution.fill_(turn * (bucket + 1) * (group.rank + 1))
                pending.append(averager.launch(bucket, f"bucket {bucket}"))
            for one in pending:
                one.wait()
            pending = []
            for bucket in order:
                expected = torch.full((64,), turn * (bucket + 1) * 3.0)
                if not torch.equal(memory[bucket].average, expected):
                    return False, f"bucket {bucket}"
        refused = ""
        if group.rank == 0:
            averager.launch(0, "bucket 0")
            try:
                averager.launch(0, "bucket 0")
            except UsageError as error:
                refused = str(error)
        return True, refused


def test_launch_order_and_a_bucket_launched_twice() -> None:
    (good, refused), other = ranks.spawn(launch_order, 2)
    assert good
    assert other == (True, "")
    assert "bucket 0 was launched again" in refused


def three_times() -> list[tuple[int, int, int, list[str]]]:
    """Descriptors and threads after each of three averagers, with a new layout in each."""
    found = []
    for _ in range(3):
        with averaging() as (group, chosen):
            for sizes in (LAYOUTS[1], LAYOUTS[2]):
                memory = chosen.averager.lay_out(sizes)
                go_round(group, chosen.averager, memory, sizes, 1)
            del memory
        maps = [m for m in Path("/proc/self/maps").read_text().splitlines() if "sapwood-" in m]
        names = [t.name for t in threading.enumerate() if t.name.startswith("sapwood")]
        found.append((len(descriptors("memfd:", "eventfd")), local_sockets(), len(maps), names))
    return found


@pytest.mark.parametrize("sizes", [None, pytest.param([2, 1], marks=needs_machines)])
def test_nothing_is_left_after_close(sizes: list[int] | None) -> None:
    before = set(Path("/dev/shm").iterdir())
    for found in ranks.spawn(three_times, 3, machines=sizes):
        assert found[1] == found[2]
        assert found[2][2:] == (0, [])
    assert set(Path("/dev/shm").iterdir()) <= before


def average_once(wanted: str) -> tuple[str, str, bool]:
    with averaging(wanted) as (group, chosen):
        memory = chosen.averager.lay_out([(10, torch.float32)])
        memory[0].contribution.fill_(1.0)
        chosen.averager.launch(0, "bucket").wait()
        return chosen.averager.name, chosen.reason, bool((memory[0].average == group.world).all())


def test_a_wish_is_fulfilled() -> None:
    assert ranks.spawn(average_once, 2, "direct") == [("direct", "asked for", True)] * 2
    assert ranks.spawn(average_once, 2, "auto") == [("node", "1 machine: 0-1", True)] * 2
    alone = ("direct", "one rank has nothing to average", True)
    assert ranks.spawn(average_once, 1, "node") == [alone]


@needs_machines
def test_ranks_apart_are_averaged_directly_unless_asked() -> None:
    apart = [("direct", "no two ranks share a machine", True)] * 2
    assert ranks.spawn(average_once, 2, "auto", machines=[1, 1]) == apart
    node = [("node", "2 machines: 0 | 1", True)] * 2
    assert ranks.spawn(average_once, 2, "node", machines=[1, 1]) == node
