"""Who has posted and summed what."""

from __future__ import annotations

import pytest

from sapwood.sync.averaging.table import Table


def test_a_bucket_can_be_summed_when_all_have_posted() -> None:
    table = Table(3, 2)
    for member in (2, 0):
        table.posted(5, member, 1)
        assert not table.can_sum(5, 1)
    assert table.missing(5, 1) == ([1], [0, 1])
    table.posted(5, 1, 1)
    assert table.can_sum(5, 1)
    assert not table.can_sum(4, 1)
    table.summed(5, 1, 1)
    assert not table.complete(5, 1)
    assert table.missing(5, 1) == ([], [0])
    table.summed(5, 0, 1)
    assert table.complete(5, 1)


def test_a_neighbour_may_be_a_round_ahead() -> None:
    table = Table(2, 2)
    table.posted(0, 1, 1)
    table.posted(0, 1, 2)
    assert not table.can_sum(0, 1)
    table.posted(0, 0, 1)
    assert table.can_sum(0, 1)
    assert not table.can_sum(0, 2)
    table.posted(0, 0, 2)
    assert table.can_sum(0, 2)


def test_going_back_is_an_error() -> None:
    table = Table(2, 1)
    table.posted(0, 1, 2)
    with pytest.raises(ConnectionError, match="round 2 was announced after round 2"):
        table.posted(0, 1, 2)
    table.summed(0, 0, 3)
    with pytest.raises(ConnectionError, match="round 1 was announced after round 3"):
        table.summed(0, 0, 1)
