"""Who sends what: every byte once, for any numbers of donors and clones."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sapwood.clone.plan import (
    LARGE_PART,
    MESSAGE,
    MOST_PARTS,
    PACKED,
    ClonePlan,
    Part,
    plan_direct,
    plan_messages,
    plan_whole,
)
from sapwood.state.catalog import Catalog, Entry


def entry(name: str, size: int, holders: tuple[int, ...] = (0,)) -> Entry:
    return Entry(file="model", name=name, dtype="F32", shape=(size,), holders=holders)


@st.composite
def cases(draw: st.DrawFn) -> tuple[Catalog, list[list[tuple[str, str]]], int, int]:
    sizes = st.one_of(st.integers(0, 300), st.integers(1, 400_000))
    donors = draw(st.integers(1, 5))
    held = st.sampled_from([tuple(range(donors)), (0,), (donors - 1,)])
    wanted = draw(st.lists(st.tuples(sizes, held), max_size=20))
    entries = [entry(f"t{n}", size, holders) for n, (size, holders) in enumerate(wanted)]
    catalog = Catalog(tuple(entries))
    buckets: list[list[tuple[str, str]]] = []
    for one in entries:
        if not buckets or draw(st.booleans()):
            buckets.append([])
        buckets[-1].append(one.key)
    return catalog, buckets, donors, draw(st.integers(1, 5))


@given(cases())
def test_every_byte_is_sent_once(case: tuple) -> None:
    catalog, buckets, donors, clones = case
    plan = plan_messages(catalog, buckets, donors, clones)
    covered: dict[tuple[str, str], list[tuple[int, int]]] = {k: [] for k in catalog.by_key}
    for number, message in enumerate(plan.messages):
        assert message.tag == number
        assert all(message.donor in catalog.by_key[part.key].holders for part in message.parts)
        assert 0 <= message.clone < clones
        assert 0 < message.nbytes <= max(MESSAGE, PACKED + LARGE_PART)
        for part in message.parts:
            assert part.key in buckets[message.bucket]
            covered[part.key].append((part.start, part.stop))
    check_covered(catalog, covered)


def check_covered(catalog: Catalog, covered: dict[tuple[str, str], list[tuple[int, int]]]) -> None:
    for key, parts in covered.items():
        at = 0
        for start, stop in sorted(parts):
            assert start == at
            at = stop
        assert at == catalog.by_key[key].nbytes


@given(cases())
def test_on_one_machine_every_clone_gets_every_byte_once(case: tuple) -> None:
    catalog, buckets, donors, clones = case
    plan = plan_direct(catalog, buckets, donors, clones)
    for clone in range(clones):
        covered: dict[tuple[str, str], list[tuple[int, int]]] = {k: [] for k in catalog.by_key}
        for message in plan.received_by(clone):
            assert 0 < message.nbytes <= MESSAGE
            assert len(message.parts) <= MOST_PARTS
            for part in message.parts:
                assert part.key in buckets[message.bucket]
                covered[part.key].append((part.start, part.stop))
        check_covered(catalog, covered)
    assert contents(plan) == [parts for parts in contents(plan)[::clones] for _ in range(clones)]


def contents(plan: ClonePlan) -> list[tuple[Part, ...]]:
    """Of all messages; those to the clones follow each other."""
    return [message.parts for message in plan.messages]


@given(cases())
def test_both_sides_make_the_same_plan(case: tuple) -> None:
    catalog, buckets, donors, clones = case
    again = Catalog.from_json(catalog.to_json())
    one = plan_messages(catalog, buckets, donors, clones)
    assert one.digest == plan_messages(again, buckets, donors, clones).digest
    if one.messages:
        assert one.digest != plan_messages(catalog, buckets, donors + 1, clones + 1).digest


def test_as_many_clones_as_donors_are_served_one_to_one() -> None:
    all_ = (0, 1, 2)
    small = (entry(f"s{n}", 50, all_) for n in range(40))
    catalog = Catalog((entry("large", 4_000_000, all_), *small))
    plan = plan_messages(catalog, [[e.key for e in catalog.entries]], 3, 3)
    assert all(m.donor == m.clone for m in plan.messages)


def test_small_tensors_share_messages() -> None:
    catalog = Catalog(tuple(entry(f"s{n}", 1000) for n in range(500)))
    plan = plan_messages(catalog, [[e.key for e in catalog.entries]], 1, 1)
    assert len(plan.messages) == 2  # 2 MB of 4 KB each


@pytest.mark.parametrize(("donors", "clones"), [(2, 2), (2, 3), (3, 1)])
def test_whole_states_for_each_clone(donors: int, clones: int) -> None:
    catalog = Catalog((entry("large", 100_000), entry("small", 5), entry("none", 0)))
    plan = plan_whole(catalog, [[e.key for e in catalog.entries]], donors, clones)
    for clone in range(clones):
        mine = plan.received_by(clone)
        assert sum(m.nbytes for m in mine) == catalog.nbytes
        assert {m.donor for m in mine} == {clone % donors}
