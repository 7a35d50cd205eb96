"""The allocator's bookkeeping, against a model that looks at every run."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from sapwood.buffers.freespace import GRANULE, FreeSpace

PAGE = 4096
SPACES = ((0, 2**20), (2**21, 2**20 + 7 * GRANULE))
sizes = st.integers(1, 3000).map(lambda n: n * GRANULE)
steps = st.lists(
    st.one_of(
        st.tuples(st.just("take"), sizes, st.sampled_from((GRANULE, PAGE))),
        st.tuples(st.just("give"), st.integers(0, 2**16), st.none()),
    ),
    max_size=120,
)


def made() -> FreeSpace:
    space = FreeSpace()
    for start, nbytes in SPACES:
        space.add(start, nbytes)
    return space


def gaps(taken: dict[int, int]) -> list[tuple[int, int]]:
    """What is free, run by run, found by walking over what is taken."""
    found = []
    for begin, nbytes in SPACES:
        at, end = begin, begin + nbytes
        for start in sorted(one for one in taken if begin <= one < end):
            if at < start:
                found.append((at, start))
            at = start + taken[start]
        if at < end:
            found.append((at, end))
    return found


def fits(runs: list[tuple[int, int]], nbytes: int, alignment: int) -> bool:
    return any(-(-start // alignment) * alignment + nbytes <= end for start, end in runs)


@given(steps)
def test_runs_never_overlap_and_all_come_back(steps: list[tuple[str, int, int]]) -> None:
    space, taken = made(), dict[int, int]()
    for what, number, alignment in steps:
        if what == "take":
            before = gaps(taken)
            start = space.take(number, alignment)
            if start is None:
                # It may pass over a run that fits by luck, but none that fits wherever it begins.
                assert not fits(before, number + alignment - GRANULE, GRANULE)
                continue
            assert start % alignment == 0
            assert fits([(one, end) for one, end in before if one <= start < end], number, 1)
            taken[start] = number
        elif taken:
            start = sorted(taken)[number % len(taken)]
            space.add(start, taken.pop(start))
        assert space.runs == gaps(taken)
        assert space.nbytes == sum(end - start for start, end in space.runs)
        assert space.largest == max((end - start for start, end in space.runs), default=0)
    for start, nbytes in taken.items():
        space.add(start, nbytes)
    assert space.runs == [(start, start + nbytes) for start, nbytes in SPACES]


@given(st.lists(sizes, min_size=1, max_size=20))
def test_the_shortest_run_that_fits_is_taken(lengths: list[int]) -> None:
    space, at, runs = FreeSpace(), 0, []
    for length in lengths:
        space.add(at, length)
        runs.append((length, at))
        at += length + GRANULE
    for wanted in sorted(lengths, reverse=True):
        start = space.take(wanted)
        best = min(run for run in runs if run[0] >= wanted)
        assert start == best[1]
        runs.remove(best)


def test_the_size_that_came_back_is_found_again() -> None:
    space = FreeSpace()
    space.add(0, 100 * PAGE)
    first, fence = space.take(33 * PAGE, PAGE), space.take(PAGE)
    assert (first, fence) == (0, 33 * PAGE)
    for _ in range(3):
        space.add(0, 33 * PAGE)
        assert space.take(33 * PAGE, PAGE) == 0


def test_a_run_on_a_page_is_found_among_many_that_are_not() -> None:
    space = FreeSpace()
    for number in range(100):  # each long enough, and none of them on a page
        space.add(number * 4 * PAGE + GRANULE, 2 * PAGE)
    assert space.take(2 * PAGE, PAGE) is None
    space.add(2**30, 4 * PAGE)
    assert space.take(2 * PAGE, PAGE) == 2**30


def test_the_run_before_an_end_is_known() -> None:
    space = FreeSpace()
    space.add(0, PAGE)
    assert (space.ending_at(PAGE), space.ending_at(2 * PAGE)) == (PAGE, 0)
