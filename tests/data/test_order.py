"""Orders are pure functions: the same batches on any number of ranks, each record as often."""

from __future__ import annotations

import tracemalloc
import zlib
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sapwood.data.order import Chunks, Order, OrderSpec, quality_of
from sapwood.data.order.permute import Permutation, key_of, mix
from sapwood.errors import ConfigError, DataError

CHUNK = 4096


def chunks_of(count: int, seed: int = 0, longest: int = 3000) -> Chunks:
    """Records of any length, in a file whose order is not that of keys."""
    chance = np.random.default_rng(seed)
    lengths = chance.integers(0, longest, count)
    places = np.cumsum(lengths + chance.integers(0, 5000, count) * (chance.random(count) < 0.1))
    order = chance.permutation(count)
    return Chunks.of((places - lengths)[order], lengths[order], CHUNK)


SPECS = st.builds(
    OrderSpec,
    batch=st.integers(1, 40),
    shuffle=st.sampled_from(["none", "window", "global"]),
    seed=st.integers(0, 5),
    tail=st.sampled_from(["pad", "drop", "keep"]),
    streams=st.integers(1, 9),
    window=st.integers(1, 50),
) | st.builds(
    OrderSpec,
    batch=st.integers(1, 40),
    shuffle=st.just("reuse"),
    seed=st.integers(0, 5),
    tail=st.sampled_from(["pad", "drop", "keep"]),
    streams=st.integers(1, 9),
    window=st.integers(1, 50),
    factor=st.integers(1, 4),
    scope=st.sampled_from(["process", "node", "group"]),
    cell=st.integers(1, 4),
)
COUNTS = st.integers(1, 300)


def order_of(spec: OrderSpec, count: int) -> Order:
    try:
        return Order(spec, chunks_of(count))
    except ConfigError:  # an epoch shorter than a batch, with tail="drop"
        assert spec.tail == "drop"
        assert count * spec.factor < spec.batch
        return Order(OrderSpec(batch=1), chunks_of(count))


@settings(max_examples=60)
@given(SPECS, COUNTS, st.integers(0, 3))
def test_ranks_together_give_the_same_batches(spec: OrderSpec, count: int, epoch: int) -> None:
    order = order_of(spec, count)
    numbers = list(range(order.batches))
    whole = order.parts(epoch, numbers)
    for world in (1, 2, 3, 4, 7):
        parts = [order.parts(epoch, numbers, rank=rank, world=world) for rank in range(world)]
        for number in numbers:
            mine = [part[number] for part in parts]
            assert np.array_equal(np.concatenate(mine), whole[number])
            sizes = [len(one) for one in mine]
            assert max(sizes) - min(sizes) <= 1


@settings(max_examples=150)
@given(SPECS, COUNTS, st.integers(0, 3))
def test_an_epoch_has_every_record_as_often(spec: OrderSpec, count: int, epoch: int) -> None:
    order = order_of(spec, count)
    batches = order.parts(epoch, range(order.batches))
    spec = order.spec
    short = order.samples % spec.batch
    for number, batch in enumerate(batches):
        last = number == order.batches - 1
        assert len(batch) == (short if spec.tail == "keep" and last and short else spec.batch)
        assert len(batch) == order.rows(number)
    found = Counter(np.concatenate(batches).tolist())
    assert set(found) <= set(range(count))
    surplus = sum(found.values()) - count * spec.factor
    if spec.tail == "keep":
        assert set(found.values()) == {spec.factor}
        assert len(found) == count
    elif spec.tail == "drop":
        assert -spec.batch < surplus <= 0
        assert max(found.values()) <= spec.factor
    else:
        assert 0 <= surplus < spec.batch
        assert len(found) == count
        assert min(found.values()) >= spec.factor


@settings(max_examples=60)
@given(SPECS, COUNTS, st.data())
def test_a_batch_depends_on_nothing_that_was_asked_before(
    spec: OrderSpec, count: int, data: st.DataObject
) -> None:
    used, numbers = order_of(spec, count), st.integers(0, 10)
    for _ in range(5):
        epoch, number = data.draw(numbers), data.draw(numbers) % used.batches
        fresh = order_of(spec, count)
        assert np.array_equal(used.batch(epoch, number), fresh.batch(epoch, number))


@pytest.mark.parametrize("shuffle", ["window", "global", "reuse"])
def test_seeds_and_epochs_give_other_orders(shuffle: str) -> None:
    spec = {"batch": 50, "shuffle": shuffle, "streams": 5, "window": 40}
    orders = [Order(OrderSpec(seed=seed, **spec), chunks_of(2000)) for seed in (0, 1)]
    first = [tuple(one.batch(epoch, 0).tolist()) for one in orders for epoch in range(3)]
    assert len(set(first)) == 6
    assert not any(list(one) == list(range(50)) for one in first)


def test_padding_goes_round_the_circle() -> None:
    order = Order(OrderSpec(batch=8, tail="pad"), chunks_of(3))
    assert order.batch(0, 0).tolist() == [0, 1, 2, 0, 1, 2, 0, 1]
    order = Order(OrderSpec(batch=4, tail="pad"), chunks_of(6))
    assert [order.batch(0, n).tolist() for n in (0, 1)] == [[0, 1, 2, 3], [4, 5, 0, 1]]


@pytest.mark.parametrize("streams", [1, 4, 8])
@pytest.mark.parametrize("shuffle", ["window", "reuse"])
def test_few_chunks_are_needed_at_the_same_time(streams: int, shuffle: str) -> None:
    """Whoever keeps the chunks of each stream's window reads every chunk about once."""
    chunks, window = chunks_of(4000, longest=800), 60
    factor = 3 if shuffle == "reuse" else 1
    spec = OrderSpec(batch=32, shuffle=shuffle, streams=streams, window=window, factor=factor)
    order = Order(spec, chunks)
    owner = np.empty(4000, np.int64)
    owner[chunks.at(np.arange(chunks.count))] = np.repeat(np.arange(len(chunks)), chunks.counts)
    uses = [set(owner[one].tolist()) for one in order.parts(1, range(order.batches))]
    seen = {
        chunk: [n for n, use in enumerate(uses) if chunk in use] for chunk in range(len(chunks))
    }
    open_at = Counter(n for turns in seen.values() for n in range(turns[0], turns[-1] + 1))
    apart = window / chunks.counts.mean()
    # A chunk at the border of two streams is needed at two times, and counts for all between.
    assert max(open_at.values()) <= streams * (2 * apart + 4) + streams


def test_ranks_read_apart_when_there_are_as_many_streams() -> None:
    chunks = chunks_of(4000, longest=800)
    spec = OrderSpec(batch=64, shuffle="window", streams=8, window=50)
    order, owner = Order(spec, chunks), np.empty(4000, np.int64)
    owner[chunks.at(np.arange(chunks.count))] = np.repeat(np.arange(len(chunks)), chunks.counts)
    for world in (2, 4, 8):
        reads = 0
        for rank in range(world):
            parts = order.parts(0, range(order.batches - 1), rank=rank, world=world)
            reads += len(set(owner[np.concatenate(parts)].tolist()))
        assert reads <= len(chunks) + world


@pytest.mark.parametrize("scope", ["process", "node", "group"])
def test_reuse_stays_in_memory_and_in_scope(scope: str) -> None:
    streams, window, factor, cell = 6, 10, 3, 2
    spec = OrderSpec(
        batch=12,
        shuffle="reuse",
        streams=streams,
        window=window,
        factor=factor,
        scope=scope,
        cell=cell,
    )
    order, held = Order(spec, chunks_of(180)), streams * window
    every = np.concatenate(order.parts(0, range(order.batches)))
    for load in range(3):
        turns = every[load * held * factor : (load + 1) * held * factor].reshape(factor, held)
        sets = [set(one.tolist()) for one in turns]
        assert sets[0] == sets[1] == sets[2]
        assert len(sets[0]) == held
        assert len({tuple(one) for one in turns.tolist()}) == factor
    width = {"process": 1, "node": cell, "group": streams}[scope]
    shares: dict[int, set[int]] = {}
    for number in range(held * factor // 12):
        for stream, records in enumerate(np.split(order.batch(0, number), streams)):
            shares.setdefault(stream // width, set()).update(records.tolist())
    assert sum(len(one) for one in shares.values()) == held  # no record in two cells


@pytest.mark.parametrize(
    ("shuffle", "first", "all_of_it"),
    [
        ("window", [105, 914, 484, 102, 920, 97], 698299349),
        ("global", [572, 133, 30, 785, 283, 511], 1510595947),
        ("reuse", [725, 745, 483, 474, 993, 108], 3963615373),
    ],
)
def test_orders_of_today_are_those_of_tomorrow(
    shuffle: str, first: list[int], all_of_it: int
) -> None:
    """A state in a checkpoint names a seed: what it stands for may never change."""
    chunks = Chunks.of(np.arange(1000) * 4096 + 16, np.full(1000, 3000), 65_536)
    more = {"factor": 2, "scope": "group"} if shuffle == "reuse" else {}
    spec = OrderSpec(batch=50, shuffle=shuffle, streams=5, window=40, seed=7, **more)
    order = Order(spec, chunks)
    found = np.concatenate(order.parts(3, range(order.batches)))
    assert found[:6].tolist() == first
    assert zlib.crc32(found.astype("<i8").tobytes()) == all_of_it
    assert key_of(1, 2, 3) == 6265010921381000625
    large = Permutation(300_007, 5)(np.arange(5)).tolist()
    assert large == [1035, 69695, 281495, 106719, 107757]


@settings(max_examples=40)
@given(
    st.integers(1, 9), st.integers(1, 400), st.integers(1, 5), st.sampled_from(["process", "node"])
)
def test_records_are_reused_in_the_order_of_the_first_release(
    streams: int, window: int, cell: int, scope: str
) -> None:
    spec = OrderSpec(
        batch=64, shuffle="reuse", streams=streams, window=window, factor=2, scope=scope, cell=cell
    )
    count = 3 * streams * window + 7
    order, places = Order(spec, chunks_of(count)), np.arange(streams * window)
    mixed = 1 if scope == "process" else min(cell, streams)
    for turn in range(3):
        key = np.uint64(key_of(0, 4, 1, turn))
        mine = places % streams // mixed
        words = mix(places.astype(np.uint64) * np.uint64(2**33 + 1) + key)
        expected = np.empty_like(places)
        expected[np.argsort(mine, kind="stable")] = np.lexsort((words, mine))
        assert np.array_equal(order._turn(1, turn, len(places)), expected)


@pytest.mark.parametrize("shuffle", ["window", "reuse"])
def test_what_is_drawn_takes_little_memory(shuffle: str) -> None:
    """However small records are, and however many epochs there were."""
    count = 200_000
    chunks = Chunks.of(np.arange(count) * 100, np.full(count, 90), 2**20)
    spec = OrderSpec(
        batch=1000, shuffle=shuffle, streams=4, window=20_000, factor=2 if shuffle == "reuse" else 1
    )
    order, used = Order(spec, chunks), []
    tracemalloc.start()
    try:
        for epoch in range(8):
            for first in range(0, order.batches, 20):
                order.parts(epoch, range(first, min(first + 20, order.batches)))
            used.append(tracemalloc.get_traced_memory()[0])
    finally:
        tracemalloc.stop()
    assert max(used) < 10 * 2**20


@pytest.mark.parametrize("count", [1, 2, 3, 5, 1000, 2**17, 2**17 + 1, 300_007])
def test_permutations_have_every_number_once(count: int) -> None:
    found = Permutation(count, key_of(7, count))(np.arange(count))
    assert np.array_equal(np.sort(found), np.arange(count))
    if count > 1000:
        assert np.abs(found - np.arange(count)).mean() > count / 4


def test_permutations_are_drawn_evenly() -> None:
    seen = Counter(tuple(Permutation(4, key_of(n))(np.arange(4)).tolist()) for n in range(4800))
    assert len(seen) == 24
    assert all(130 < times < 270 for times in seen.values())


def test_large_permutations_scatter_neighbours() -> None:
    count = 2**17 + 77
    found = Permutation(count, key_of(3))(np.arange(count))
    steps = np.abs(np.diff(found)) / count
    assert 0.32 < steps.mean() < 0.345
    assert abs(np.corrcoef(np.arange(count), found)[0, 1]) < 0.01


def test_better_shuffles_have_better_scores() -> None:
    chunks = chunks_of(20_000)
    base = {"batch": 64, "streams": 8}
    specs = [
        OrderSpec(shuffle="none", **base),
        OrderSpec(shuffle="window", window=20, **base),
        OrderSpec(shuffle="window", window=400, **base),
        OrderSpec(shuffle="global", **base),
    ]
    found = [quality_of(spec, chunks) for spec in specs]
    assert found[0].score == 0
    assert found[0].travel == 0
    assert found[3].score == 1
    assert [one.score for one in found] == sorted(one.score for one in found)
    assert found[1].apart == 160 < found[2].apart == 3200 < found[3].apart
    assert "a batch is one of 10^" in str(found[1])


def test_a_wider_scope_composes_more_batches() -> None:
    base = {"batch": 64, "shuffle": "reuse", "streams": 8, "window": 100, "factor": 2, "cell": 4}
    found = [
        quality_of(OrderSpec(scope=scope, **base), chunks_of(20_000)).batches
        for scope in ("process", "node", "group")
    ]
    assert found == sorted(found)
    assert found[0] < found[2]


def test_refusals() -> None:
    with pytest.raises(ConfigError, match="streams=0: expected 1 or more"):
        OrderSpec(batch=1, streams=0)
    with pytest.raises(ConfigError, match="shuffle='some': expected one of none"):
        OrderSpec(batch=1, shuffle="some")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="factor=2 is for shuffle='reuse', not 'window'"):
        OrderSpec(batch=1, shuffle="window", factor=2)
    with pytest.raises(ConfigError, match="an epoch has only 3 records and so no batch"):
        Order(OrderSpec(batch=4, tail="drop"), chunks_of(3))
    with pytest.raises(DataError, match="no records"):
        Order(OrderSpec(batch=4), chunks_of(0))
    with pytest.raises(ConfigError, match="chunk=5000: expected a multiple of 4096"):
        Chunks.of(np.zeros(1, np.int64), np.zeros(1, np.int64), 5000)
