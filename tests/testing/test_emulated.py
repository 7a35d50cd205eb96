"""The emulated device: real gradients, absolute deadlines, and no core used while it waits."""

from __future__ import annotations

import copy
import math
import threading
import time
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from sapwood.errors import ConfigError, UsageError
from sapwood.sync.reads import WeightReads
from sapwood.testing import ranks, workloads
from sapwood.testing.workloads.emulated import Device
from sapwood.testing.workloads.presets import PRESETS

FAST = {"preset": "uniform", "scale": 0.02, "speed": math.inf}


class FakeTime:
    """A clock that only sleeping and ``pass_`` move; every sleep ends late."""

    def __init__(self, late: float) -> None:
        self.now, self.late = 100.0, late
        self.slept = 0

    def clock(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds + self.late
        self.slept += 1

    def device(self) -> Device:
        return Device(self.clock, self.sleep)


def run(device: Device, seconds: float) -> None:
    device.wait(device.launch(seconds))


def gradients(work: workloads.Workload, rank: int = 0, step: int = 0) -> list[torch.Tensor]:
    return gradients_of(work, work.model(), rank, step)


def gradients_of(
    work: workloads.Workload, model: nn.Module, rank: int = 0, step: int = 0
) -> list[torch.Tensor]:
    x, y = work.batch(step, rank, 2)
    work.loss(model(x), y).backward()
    found = [parameter.grad for parameter in model.parameters()]
    assert all(gradient is not None for gradient in found)
    return [gradient.clone() for gradient in found]


@pytest.mark.parametrize(
    ("preset", "parameters", "tensors"),
    [
        ("resnet50", 25_557_032, 161),
        ("resnet152", 60_192_808, 467),
        ("densenet121", 7_978_856, 364),
        ("vgg16", 138_357_544, 32),
        ("vgg19", 143_667_240, 38),
        ("bert-large", 335_141_888, 391),
        ("nt3", 154_922_918, 10),
    ],
)
def test_presets_have_the_shapes_of_the_networks(
    preset: str, parameters: int, tensors: int
) -> None:
    work = workloads.emulated(preset=preset)
    assert work.parameters == parameters
    with torch.device("meta"):
        assert len(list(work.build().parameters())) == tensors


@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_layers_divide_the_time_of_a_pass(preset: str) -> None:
    with torch.device("meta"):
        layers = list(workloads.emulated(preset=preset, speed=2).build().layers.values())
    assert sum(one.forward_seconds for one in layers) == pytest.approx(PRESETS[preset].forward / 2)
    assert sum(one.backward_seconds for one in layers) == pytest.approx(
        PRESETS[preset].backward / 2
    )


def test_sizes_scale() -> None:
    whole = workloads.emulated(preset="resnet50")
    quarter = workloads.emulated(preset="resnet50", scale=0.25)
    assert quarter.parameter_bytes == pytest.approx(whole.parameter_bytes / 4, rel=0.05)
    sized = workloads.emulated(preset="nt3", mb=60)
    assert sized.parameter_bytes == pytest.approx(60e6, rel=0.05)


def test_gradients_are_whole_fixed_and_of_the_rank() -> None:
    work = workloads.emulated(**FAST)
    first, again, other = gradients(work), gradients(work), gradients(work, rank=1)
    for parameter, one, same, theirs in zip(
        work.model().parameters(), first, again, other, strict=True
    ):
        assert one.shape == parameter.shape
        assert torch.equal(one, same)
        assert not torch.equal(one, theirs)
        assert bool((one != 0).float().mean() > 0.99)


def test_gradients_depend_on_the_weights() -> None:
    work = workloads.emulated(**FAST)
    model = work.model()
    before = gradients_of(work, model)
    with torch.no_grad():
        model.layers["layer3"].weight.mul_(3)
    model.zero_grad()
    after = gradients_of(work, model)
    assert not any(map(torch.equal, before, after))


def test_the_first_values_have_true_gradients() -> None:
    work = workloads.emulated(**FAST)
    model = work.model().double()
    x, y = work.batch(0)

    def loss() -> torch.Tensor:
        return work.loss(model(x.double()), y)

    loss().backward()
    weight = model.layers["layer7"].weight
    flat, step = weight.detach().view(-1), 1e-6
    for place in (0, 5, 255):
        flat[place] += step
        above = loss().item()
        flat[place] -= 2 * step
        below = loss().item()
        flat[place] += step
        expected = (above - below) / (2 * step)
        assert weight.grad.view(-1)[place].item() == pytest.approx(expected, rel=1e-4, abs=1e-9)


def test_gradients_accumulate_and_outlive_the_step() -> None:
    work = workloads.emulated(**FAST)
    model = work.model()
    first = gradients_of(work, model, step=0)
    both = gradients_of(work, model, step=1)
    kept = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    second = gradients_of(work, model, step=1)
    for one, two, sum_, held in zip(first, second, both, kept, strict=True):
        assert torch.equal(one + two, sum_)
        assert torch.equal(sum_, held), "memory was used again while somebody held it"


def test_memory_of_a_dropped_gradient_is_used_again() -> None:
    work = workloads.emulated(**FAST)
    model = work.model()
    places = []
    for step in range(3):
        gradients_of(work, model, step=step)
        # Biases are too small to be worth it.
        places.append([layer.weight.grad.data_ptr() for layer in model.layers.values()])
        model.zero_grad(set_to_none=True)
    assert places[0] == places[1] == places[2]


def test_copies_and_frozen_parameters() -> None:
    work = workloads.emulated(**FAST)
    model = work.model()
    gradients_of(work, model)
    twin = copy.deepcopy(model)
    twin.zero_grad()
    frozen = model.layers["layer4"].weight.requires_grad_(False)
    frozen.grad = None
    for one, two in zip(gradients(work), gradients_of(work, twin), strict=True):
        assert torch.equal(one, two)
    x, y = work.batch(0)
    work.loss(model(x), y).backward()
    assert frozen.grad is None


def test_gradients_have_the_layout_of_their_weights() -> None:
    work = workloads.emulated(preset="resnet50", mb=1, speed=math.inf)
    plain, other = work.model(), work.model().to(memory_format=torch.channels_last)
    for model in (plain, other):
        gradients_of(work, model)
        for parameter in model.parameters():
            assert parameter.grad.stride() == parameter.stride()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_dtypes(dtype: torch.dtype) -> None:
    work = workloads.emulated(**FAST)
    model = work.model().to(dtype)
    assert {one.dtype for one in gradients_of(work, model)} == {dtype}


def test_weights_are_read_as_ordinary_layers_read_them() -> None:
    """Otherwise the engine would update them all at the end of backward, to be safe."""
    work = workloads.emulated(**FAST)
    model = work.model()
    names, parameters = zip(*model.named_parameters(), strict=True)
    watched = SimpleNamespace(model=model, names=names, parameters=parameters)
    reads = WeightReads(watched, UsageError)
    x, y = work.batch(0)
    reads.start_forward()
    output = model(x)
    reads.end_forward()
    reads.start_backward()
    hooks = [
        parameter.register_post_accumulate_grad_hook(
            lambda _, index=index: reads.seal([index], updated=True)
        )
        for index, parameter in enumerate(parameters)
    ]
    work.loss(output, y).backward()
    reads.end_backward()
    assert reads.late == set()
    assert len(hooks) == len(parameters)


def test_late_wake_ups_do_not_add_up() -> None:
    fake = FakeTime(late=0.004)
    device = fake.device()
    device.begin()
    for _ in range(100):
        run(device, 0.01)
    assert fake.now == pytest.approx(100.0 + 1.0 + 0.004)


def test_short_layers_catch_up_after_a_late_wake_up() -> None:
    fake = FakeTime(late=0.004)
    device = fake.device()
    device.begin()
    for _ in range(1000):
        run(device, 0.001)
    assert fake.now == pytest.approx(100.0 + 1.0, abs=0.005)
    assert fake.slept < 500


def test_a_host_that_stays_away_delays_the_device() -> None:
    fake = FakeTime(late=0.0)
    device = fake.device()
    device.begin()
    run(device, 0.01)
    fake.now += 0.5
    run(device, 0.01)
    assert fake.now == pytest.approx(100.52, abs=0.0011)


def test_a_short_stay_of_the_host_is_hidden_by_the_queue() -> None:
    fake = FakeTime(late=0.0)
    device = fake.device()
    device.begin()
    for _ in range(50):
        run(device, 0.01)
        fake.now += 0.0005
    assert fake.now == pytest.approx(100.0 + 0.5 + 0.0005)


def test_a_forward_begins_when_it_is_called() -> None:
    fake = FakeTime(late=0.0)
    device = fake.device()
    for _ in range(10):
        device.begin()
        run(device, 0.01)
        fake.now += 0.0005
    assert fake.now == pytest.approx(100.0 + 10 * 0.0105)


def test_waiting_uses_no_core_and_leaves_the_interpreter_free() -> None:
    work = workloads.emulated(preset="uniform", scale=0.01, speed=0.5)
    model, (x, y) = work.model(), work.batch(0)
    turns, done = 0, threading.Event()

    def count() -> None:
        nonlocal turns
        while not done.wait(0.001):
            turns += 1

    other = threading.Thread(target=count)
    other.start()
    used, began = time.thread_time(), time.monotonic()
    work.loss(model(x), y).backward()
    used, took = time.thread_time() - used, time.monotonic() - began
    done.set()
    other.join()
    assert took >= 0.99 * 2 * (PRESETS["uniform"].forward + PRESETS["uniform"].backward)
    assert used < 0.5 * took
    assert turns > 10


def emulated_weights() -> list[float]:
    work = workloads.emulated(**FAST)
    model = work.model()
    gradients_of(work, model)
    return [float(parameter.grad.double().sum()) for parameter in model.parameters()]


def test_two_processes_have_the_same_gradients() -> None:
    first, second = ranks.spawn(emulated_weights, 2)
    assert first == second == emulated_weights()


def test_wrong_options_are_refused_in_words() -> None:
    with pytest.raises(ConfigError, match="no preset is called 'alexnet'; there are resnet50"):
        workloads.by_name("emulated", preset="alexnet")
    with pytest.raises(ConfigError, match="both say the size"):
        workloads.emulated(mb=3, scale=0.5)
    with pytest.raises(ConfigError, match="scale=0"):
        workloads.emulated(scale=0)
    with pytest.raises(ConfigError, match="speed=nan"):
        workloads.emulated(speed=math.nan)
    with pytest.raises(ConfigError, match="mb=-1"):
        workloads.emulated(mb=-1)
