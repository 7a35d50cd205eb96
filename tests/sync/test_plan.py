"""Buckets: every parameter once, in order, of one dtype, not larger than asked."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from sapwood.sync.plan import lay_out
from sapwood.sync.replan import Replanner

DTYPES = st.sampled_from([torch.float32, torch.bfloat16])


@given(
    shapes=st.lists(st.tuples(st.integers(0, 400), DTYPES), min_size=1, max_size=40),
    used=st.data(),
    first=st.integers(1, 1000),
    size=st.integers(1, 4000),
)
def test_layout_is_a_partition_in_order(
    shapes: list[tuple[int, torch.dtype]], used: st.DataObject, first: int, size: int
) -> None:
    parameters = [torch.empty(n, dtype=dtype) for n, dtype in shapes]
    order = used.draw(st.permutations(range(len(parameters))))
    order = order[: used.draw(st.integers(0, len(order)))]
    plan = lay_out(order, parameters, first_bytes=first, bucket_bytes=size, reason="test")
    assert list(plan.order) == order
    assert set(plan.dormant) == set(range(len(parameters))) - set(order)
    for number, bucket in enumerate(plan.buckets):
        assert len({parameters[i].dtype for i in bucket}) == 1
        nbytes = sum(parameters[i].numel() * parameters[i].element_size() for i in bucket)
        assert len(bucket) == 1 or nbytes <= (first if number == 0 else size)


def test_the_last_buckets_are_small() -> None:
    parameters = [torch.empty(25) for _ in range(100)]  # 100 bytes each
    plan = lay_out(range(100), parameters, first_bytes=100, bucket_bytes=1600, reason="test")
    sizes = [len(bucket) for bucket in plan.buckets]
    assert sizes == [1, 16, 16, 16, 16, 16, 9, 5, 4, 1]


def test_a_plan_is_remade_only_when_a_misfit_persists() -> None:
    replanner = Replanner(3)
    for steps in range(1, 4):
        assert not replanner.note([5], [], disorder=False, empty_plan=False)
        assert (replanner.reason is not None) == (steps == 3)
    assert replanner.silent() == {5}


def test_alternating_branches_do_not_thrash() -> None:
    replanner = Replanner(3)
    for step in range(50):
        replanner.note([step % 2], [], disorder=False, empty_plan=False)
    assert replanner.reason is None


def test_each_new_plan_makes_the_next_one_less_likely() -> None:
    replanner = Replanner(1)
    needed = []
    for _ in range(3):
        steps = 0
        while replanner.reason is None:
            replanner.note([], [7], disorder=False, empty_plan=False)
            steps += 1
        needed.append(steps)
        replanner.planned()
    assert needed == [1, 2, 4]


def test_an_empty_plan_is_remade_at_once() -> None:
    replanner = Replanner(3)
    replanner.note([], [1, 2], disorder=False, empty_plan=True)
    assert replanner.reason is not None
