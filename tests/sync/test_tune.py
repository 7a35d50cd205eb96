"""Bucket sizes and the moment of updates are measured in a run's first steps, and agreed."""

from __future__ import annotations

import json
from collections.abc import Container, Iterable
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import sapwood
from sapwood.events import TensorUpdated
from sapwood.runtime.group import Group
from sapwood.sync import tune
from sapwood.sync.tune import Choice, Tuner
from sapwood.testing import ranks
from sapwood.testing.ranks import rank

LARGE = 64 * 2**20
A, B, C = Choice(bucket_mb=25.0), Choice(bucket_mb=8.0), Choice(bucket_mb=25.0, overlap=False)
TRIAL_STEPS = 6 * (1 + 4)


class Alone:
    """A group of one."""

    world = 1
    device = torch.device("cpu")

    def share_text(self, key: str, text: str) -> str:
        return text


def tuner(bucket_mb: float | None = None, *, averaging: str = "node") -> Tuner:
    return Tuner(cast(Group, Alone()), averaging, bucket_mb, "layerwise")


def train(made: Tuner, seconds: dict[Choice, float], limit: int = 100) -> list[Choice]:
    """Steps until nothing is due any more; which choice each trained with."""
    made.begin(LARGE, late=True)
    used = []
    while made.learned is None and len(used) < limit:
        if made.due is not None:
            made.decide()
            made.planned()
        used.append(made.choice)
        made.note(seconds[made.choice])
        if made.due == "trials are over":
            made.decide()
            made.planned()
    return used


def test_every_candidate_is_tried_twice_and_the_best_is_taken() -> None:
    made = tuner()
    used = train(made, {A: 1.0, B: 1.2, C: 0.9})
    assert [used.count(c) for c in (A, B, C)] == [10, 10, 10]
    assert len(used) == TRIAL_STEPS
    assert made.choice == C
    assert made.due is None
    assert made.learned is not None
    assert "900.0 ms" in made.learned
    assert "1200.0 ms" in made.learned


def test_a_gain_that_may_be_noise_changes_nothing() -> None:
    made = tuner()
    train(made, {A: 1.0, B: 1.2, C: 0.98})
    assert made.choice == A


def test_one_slow_step_decides_nothing() -> None:
    made = tuner()
    times = iter([1.0] * 4 + [60.0] + [1.0] * 100)
    made.begin(LARGE, late=True)
    for _ in range(6):
        made.planned()
        for _ in range(5):
            made.note(next(times) * {A: 1.0, B: 1.1, C: 1.2}[made.choice])
        made.decide()
    assert made.choice == A
    assert made.learned is not None


def test_steps_without_a_batch_count_but_are_not_timed() -> None:
    made = tuner()
    train(made, {A: 1.0, B: 0.5, C: 0.9})
    idle = tuner()
    idle.begin(LARGE, late=True)
    steps = 0
    while idle.learned is None:
        idle.planned()
        for _ in range(5):
            idle.note(None)
            steps += 1
        idle.decide()
    assert (steps, idle.choice) == (TRIAL_STEPS, A)


def test_buckets_overlap_where_somebody_waits_for_tensors_or_a_network_would_idle() -> None:
    awaited, direct = tuner(), tuner(averaging="direct")
    awaited.begin(LARGE, late=False)
    direct.begin(LARGE, late=True)
    for made, sizes in ((awaited, [25.0, 8.0, 100.0]), (direct, [8.0, 25.0, 100.0])):
        assert made._trials == [Choice(bucket_mb=s) for s in (*sizes, *reversed(sizes))]


def test_nothing_is_measured_where_it_is_asked_for_small_or_must_be_repeatable() -> None:
    asked, small, repeatable = tuner(3.0), tuner(), tuner()
    asked.begin(LARGE, late=True)
    small.begin(2**20, late=True)
    torch.use_deterministic_algorithms(True)
    try:
        repeatable.begin(LARGE, late=True)
    finally:
        torch.use_deterministic_algorithms(False)
    for made in (asked, small, repeatable):
        for _ in range(100):
            made.note(1.0)
        assert made.due is None
        assert made.learned is None
        assert made.state_dict() == {}
    assert asked.choice == Choice(bucket_mb=3.0)


def test_a_choice_is_taken_over_from_a_checkpoint_of_the_same_kind() -> None:
    first = tuner()
    train(first, {A: 1.0, B: 0.5, C: 0.9})
    state = json.loads(json.dumps(first.state_dict()))
    again, other_way, asked = tuner(), tuner(averaging="direct"), tuner(3.0)
    for made in (again, other_way, asked):
        made.load_state_dict(state)
    assert again.choice == B
    assert again.learned == first.learned
    again.begin(LARGE, late=True)
    assert not again._trials
    assert other_way.choice.bucket_mb == 8.0
    assert other_way.learned is None
    assert asked.choice.bucket_mb == 3.0
    halfway = tuner()
    halfway.begin(LARGE, late=True)
    halfway.load_state_dict(state)
    assert halfway.choice == B
    assert halfway.due is not None
    assert not halfway._trials
    halfway.load_state_dict({})  # an earlier version's, or one saved while measuring


# -- in real runs ------------------------------------------------------------------------------


def model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(*(m for _ in range(6) for m in (nn.Linear(40, 40), nn.Tanh())))


def batch(step: int) -> Tensor:
    return torch.randn(4, 40, generator=torch.Generator().manual_seed(step * 100 + rank()))


def reference(steps: int) -> list[Tensor]:
    plain = model()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    wrapped = DistributedDataParallel(plain)
    for step in range(steps):
        wrapped(batch(step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach() for p in plain.parameters()]


def make_measurable() -> None:
    tune._WORTHWHILE = 0
    tune._SIZES = (0.01, 25.0, 100.0)


def go(run: sapwood.Run, steps: Iterable[int], absent: Container[int] = ()) -> None:
    for step in steps:
        if step not in absent:
            run.model(batch(step)).square().mean().backward()
        run.step()


def same(left: Iterable[Tensor], right: Iterable[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def measured(folder: Path) -> dict[str, Any]:
    make_measurable()
    steps = TRIAL_STEPS + 6
    want = reference(steps)
    said = {}
    for update in ("layerwise", "deferred"):
        net = model()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        with sapwood.Run(net, optimizer, folder=folder, update=update) as run:
            seen: list[TensorUpdated] = []
            go(run, range(10))
            plans = run.stats.plans
            run.events.subscribe(TensorUpdated, seen.append, name="test")
            go(run, range(10, steps))
            assert same(net.parameters(), want)
            assert run.stats.plans > plans > 1
            assert seen
            assert run.tuner.learned is not None
            said[update] = run.tuner.learned, len(run.buckets)
    status = json.loads((run.folder / "status.json").read_text())
    return {**said, "status": status["buckets"]}


def test_two_ranks_measure_agree_and_stay_bit_for_bit(tmp_path: Path) -> None:
    first, second = ranks.spawn(measured, 2, tmp_path, init=True, timeout=100)
    assert first == second
    assert first["status"] == first["deferred"][0]


def without_overlap(folder: Path) -> None:
    small = {"bucket_mb": 0.01, "first_bucket_mb": 0.01}
    for update in ("layerwise", "deferred"):
        net = model()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        with sapwood.Run(net, optimizer, folder=folder, update=update, **small) as run:
            run.tuner.choice = Choice(bucket_mb=0.01, overlap=False)
            go(run, range(8))
            assert same(net.parameters(), reference(8))
            assert run.stats.early_updates == 0
            assert (run.stats.plans, run.stats.misfits) == (1, 0)
            assert len(run.buckets) > 4
            # Somebody subscribes in the middle of a back-propagation: what is complete goes.
            seen: list[TensorUpdated] = []

            def subscribe(_: Tensor, run: sapwood.Run = run, to: Any = seen.append) -> None:
                run.events.subscribe(TensorUpdated, to, name="test")

            handle = net[4].weight.register_hook(subscribe)
            go(run, [8])
            handle.remove()
            go(run, [9, 10])
            assert same(net.parameters(), reference(11))
            told = {name for event in seen for name in event.names}
            assert told == {name for name, _ in net.named_parameters()}
            assert (run.stats.plans, run.stats.misfits) == (1, 0)


def test_buckets_that_wait_for_the_end_of_back_propagation(tmp_path: Path) -> None:
    ranks.spawn(without_overlap, 2, tmp_path, init=True, timeout=100)


def differing(folder: Path) -> tuple[str | None, int]:
    """Each rank has no batch in other steps, also when a trial begins or ends."""
    make_measurable()
    net = model()
    with sapwood.Run(net, torch.optim.SGD(net.parameters(), lr=0.1), folder=folder) as run:
        absent = {5, 6, 11} if rank() == 0 else {4, 10, 14, 29, 30}
        go(run, range(TRIAL_STEPS + 3), absent)
        return run.tuner.learned, run.stats.plans


def test_ranks_without_a_batch_now_and_then_measure_together(tmp_path: Path) -> None:
    first, second = ranks.spawn(differing, 2, tmp_path, timeout=100)
    assert first == second
    assert first[0] is not None


def restored(folder: Path) -> tuple[str, str]:
    make_measurable()

    def training(every: int) -> tuple[sapwood.Run, sapwood.Checkpointer]:
        net = model()
        run = sapwood.Run(net, torch.optim.SGD(net.parameters(), lr=0.1), folder=folder)
        return run, sapwood.Checkpointer(run, folder / "checkpoints", every=every)

    run, keeper = training(TRIAL_STEPS + 2)
    go(run, range(TRIAL_STEPS + 2))
    keeper.close()
    run.close()
    again, keeper = training(1000)
    assert keeper.restore_latest() is not None
    go(again, range(8))
    plans = again.stats.plans
    keeper.close()
    again.close()
    assert plans == 1
    return str(run.tuner.learned), str(again.tuner.learned)


def test_what_was_chosen_is_kept_with_the_checkpoint(tmp_path: Path) -> None:
    for before, after in ranks.spawn(restored, 2, tmp_path, timeout=100):
        assert before == after != "None"
