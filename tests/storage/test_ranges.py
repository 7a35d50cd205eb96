"""Which ranges are read together."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from sapwood.storage.ranges import runs_of

PIECES = st.lists(st.tuples(st.integers(0, 5000), st.integers(0, 400)), max_size=30)
OBJECT = bytes(n % 251 for n in range(6000))


@given(PIECES, st.sampled_from([0, 10, 10_000]))
def test_every_piece_is_filled_and_little_is_read_beyond(
    rows: list[tuple[int, int]], gap: int
) -> None:
    pieces = [(at, memoryview(bytearray(nbytes))) for at, nbytes in rows]
    runs = runs_of(pieces, gap=gap)
    for run in runs:
        for cut in range(run.start, run.stop, 97):
            run.fill(cut, memoryview(OBJECT)[cut : min(cut + 97, run.stop)])
    for at, out in pieces:
        assert out == OBJECT[at : at + len(out)]
    asked = {byte for at, out in pieces for byte in range(at, at + len(out))}
    assert sum(run.stop - run.start for run in runs) <= 1.1 * len(asked)
    ends = [(run.start, run.stop) for run in runs]
    assert all(stop < start for (_, stop), (start, _) in pairwise(ends))


def test_the_shortest_gaps_are_read_over_first() -> None:
    pieces = [(at, memoryview(bytearray(100))) for at in (0, 110, 260, 365, 1000)]
    assert [(r.start, r.stop) for r in runs_of(pieces, gap=1000)] == [
        (0, 210),
        (260, 465),
        (1000, 1100),
    ]
