"""Optimizers that are not torch's, and hooks that are for all optimizers: right, or refused.

A view steps a clone of the optimizer with the parameters of one bucket. Whatever an optimizer keeps
for all parameters together, and whoever expects to see it whole, must not meet a view.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

import sapwood
from sapwood.errors import ConfigError, UsageError
from sapwood.sync.optim import Views, choose_mode
from sapwood.testing import ranks
from sapwood.testing.ranks import rank

ONES = torch.ones(1, 8)
SMALL_BUCKETS = {"first_bucket_mb": 1e-6, "bucket_mb": 1e-6}


class Plain(torch.optim.Optimizer):
    """Truly updates each parameter by itself, and says so."""

    per_parameter = True

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, {"lr": 0.1, **options})
        self.scale = 1.0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            self.before(group)
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad, alpha=group["lr"] * self.scale)

    def before(self, group: dict[str, Any]) -> None:
        """What the optimizers below do in each step."""


class InGroup(Plain):
    def before(self, group: dict[str, Any]) -> None:
        group["k"] = group.get("k", 0) + 1


class InListOfGroup(Plain):
    def __init__(self, params: Any) -> None:
        super().__init__(params, seen=[])

    def before(self, group: dict[str, Any]) -> None:
        group["seen"].append(1)


class InTensorOfGroup(Plain):
    def __init__(self, params: Any) -> None:
        super().__init__(params, total=torch.zeros(()))

    def before(self, group: dict[str, Any]) -> None:
        group["total"].add_(1)


class OnInstance(Plain):
    counter = 0

    def before(self, group: dict[str, Any]) -> None:
        self.counter += 1


class InDictOfInstance(Plain):
    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.counts = {"steps": 0}

    def before(self, group: dict[str, Any]) -> None:
        self.counts["steps"] += 1


class InState(Plain):
    def before(self, group: dict[str, Any]) -> None:
        common: dict[Any, Any] = self.state
        common.setdefault("common", {"steps": 0})["steps"] += 1


class Counts(torch.optim.SGD):
    per_parameter = True

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.param_groups[0]["k"] = self.param_groups[0].get("k", 0) + 1
        super().step(closure)


class Around(Plain):
    def __init__(self, params: Any) -> None:
        params = list(params)
        super().__init__(params)
        self.inner = torch.optim.SGD(params, lr=0.1)

    def before(self, group: dict[str, Any]) -> None:
        self.inner.step()


class Random(Plain):
    def before(self, group: dict[str, Any]) -> None:
        torch.rand(3)


KEEPERS = [
    (InGroup, r"group\['k'\]"),
    (InListOfGroup, r"group\['seen'\]"),
    (InTensorOfGroup, r"group\['total'\]"),
    (OnInstance, r"self\.counter"),
    (InDictOfInstance, r"self\.counts"),
    (InState, r"self\.state\['common'\]"),
    (Counts, r"group\['k'\]"),
    (Around, r"self\.inner holds another optimizer"),
]


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))


def facts(optimizer: torch.optim.Optimizer) -> Any:
    """What a trial could have changed."""
    names = ("counter", "counts", "scale")
    own = {name: getattr(optimizer, name, None) for name in names}
    return copy.deepcopy((own, optimizer.state_dict(), list(optimizer.state)))


@pytest.mark.parametrize("update", ["auto", "layerwise", "deferred"])
@pytest.mark.parametrize(("kind", "named"), KEEPERS)
def test_what_is_kept_for_all_parameters_is_refused_by_name(
    kind: Callable[..., torch.optim.Optimizer], named: str, update: str
) -> None:
    model = network()
    optimizer = kind(model.parameters())
    before, weights = facts(optimizer), [p.detach().clone() for p in model.parameters()]
    with pytest.raises(UsageError, match=f"{named}.*Remove per_parameter = True"):
        sapwood.Run(model, optimizer, update=update)
    assert str(facts(optimizer)) == str(before)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), weights, strict=True))
    assert all(p.grad is None for p in model.parameters())


def test_the_remedy_works() -> None:
    model, plain = network(), network()
    whole = InGroup(model.parameters())
    whole.per_parameter = False
    reference = InGroup(plain.parameters())
    with sapwood.Run(model, whole) as run:
        for _ in range(3):
            run.model(ONES).sum().backward()
            run.step()
            plain(ONES).sum().backward()
            reference.step()
            reference.zero_grad()
    assert whole.param_groups[0]["k"] == 3
    assert all(
        torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True)
    )


class Late(Plain):
    """Shows nothing in a trial, since it knows how large its parameters are."""

    def before(self, group: dict[str, Any]) -> None:
        for p in group["params"]:
            if p.shape == (2, 4):
                raise ValueError("too small")
        self.last = len(group["params"])


def take_step(run: sapwood.Run) -> None:
    """Backward too: it raises what an update beside it did, if that was early."""
    run.model(ONES).sum().backward()
    run.step()


@pytest.mark.parametrize("update", ["layerwise", "deferred"])
def test_what_a_trial_cannot_show_is_refused_in_the_first_step(update: str) -> None:
    model = network()
    with (
        sapwood.Run(model, Late(model.parameters()), update=update) as run,
        pytest.raises(UsageError, match=r"self\.last.*Remove per_parameter"),
    ):
        take_step(run)


def test_a_trial_draws_no_random_numbers_of_the_user() -> None:
    optimizer = Random(network().parameters())
    torch.manual_seed(7)
    expected = torch.rand(1)
    torch.manual_seed(7)
    assert choose_mode(optimizer, "auto", clips=False, scales=False)[0] == "layerwise"
    assert torch.equal(torch.rand(1), expected)


class Holds(Plain):
    """Has its parameters in a list too, and the last step of each in a dict of its own."""

    def __init__(self, params: Any) -> None:
        self.all = list(params)
        self.last: dict[Tensor, Tensor] = {p: torch.zeros_like(p) for p in self.all}
        super().__init__(self.all)

    def before(self, group: dict[str, Any]) -> None:
        for p in group["params"]:
            if p.grad is not None:
                self.last[p].copy_(p.grad)


def test_what_belongs_to_one_parameter_may_be_kept_anywhere() -> None:
    model = network()
    optimizer = Holds(model.parameters())
    before = [p.detach().clone() for p in model.parameters()]
    with sapwood.Run(model, optimizer, update="layerwise", **SMALL_BUCKETS) as run:  # type: ignore[arg-type]
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), before, strict=True))
        take_step(run)
    for p, value in zip(optimizer.all, before, strict=True):
        assert torch.allclose(p, value - 0.1 * optimizer.last[p])
        assert optimizer.last[p].any()


def test_attributes_that_cannot_be_copied_are_no_reason_to_refuse() -> None:
    optimizer = Plain(network().parameters())
    optimizer.lock = threading.Lock()  # type: ignore[attr-defined]
    assert choose_mode(optimizer, "auto", clips=False, scales=False)[0] == "layerwise"


def test_a_view_follows_attributes_of_a_foreign_optimizer() -> None:
    (p,) = parameters = [nn.Parameter(torch.zeros(2))]
    optimizer = Plain(parameters)
    views = Views(optimizer, None, "layerwise")
    view = views.of(parameters)
    optimizer.scale = 10.0
    p.grad = torch.ones(2)
    views.follow()
    view.step()
    assert torch.equal(p.detach(), torch.full((2,), -1.0))


def test_torchs_own_optimizers_are_not_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise AssertionError("torch's own optimizers pay nothing")

    for name in ("optim.kept", "optim.changed", "foreign._small_copy"):
        monkeypatch.setattr(f"sapwood.sync.{name}", fail)
    parameters = [nn.Parameter(torch.zeros(2))]
    optimizer = torch.optim.AdamW(parameters)
    assert choose_mode(optimizer, "auto", clips=False, scales=False)[0] == "layerwise"
    views = Views(optimizer, None, "layerwise")
    view = views.of(parameters)
    views.follow()
    view.step()


# -- hooks for all optimizers ----------------------------------------------------------------


@contextmanager
def pre_hook(hook: Callable[..., Any]) -> Iterator[None]:
    handle = register_optimizer_step_pre_hook(hook)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def post_hook(hook: Callable[..., Any]) -> Iterator[None]:
    handle = register_optimizer_step_post_hook(hook)
    try:
        yield
    finally:
        handle.remove()


def tensors_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def clip(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    torch.nn.utils.clip_grad_norm_(tensors_of(optimizer), 0.01)


def trained_by_hand(hooked: type[torch.optim.Optimizer]) -> list[Tensor]:
    model = network()
    optimizer = hooked(model.parameters(), lr=1.0)  # type: ignore[call-arg]
    for step in range(3):
        loss = sum(model(ONES * (step + r)).sum() for r in range(2)) / 2
        loss.backward()  # type: ignore[union-attr]
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach() for p in model.parameters()]


class Derived(torch.optim.SGD):
    """Calls a step that torch has wrapped itself."""

    per_parameter = True

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)


def clipped_by_a_global_hook(engine: str, update: str, derived: bool) -> tuple[Any, ...]:
    kind = Derived if derived else torch.optim.SGD
    torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)  # wraps SGD.step
    calls: list[tuple[bool, bool]] = []
    model = network()
    optimizer = kind(model.parameters(), lr=1.0)

    def note(found: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        whole = found is optimizer and args[0] is optimizer and kwargs == {}
        calls.append((whole, threading.current_thread() is threading.main_thread()))

    with pre_hook(clip):
        expected = trained_by_hand(kind)
        settings: dict[str, Any] = {"engine": engine, "update": update, **SMALL_BUCKETS}
        with (
            sapwood.Run(model, optimizer, timeout=20.0, **settings) as run,
            pre_hook(note),
            post_hook(note),
        ):
            for step in range(3):
                run.model(ONES * (step + rank())).sum().backward()
                run.step()
    pairs = zip(model.parameters(), expected, strict=True)
    return all(torch.allclose(a, b, atol=1e-6) for a, b in pairs), calls


@pytest.mark.parametrize("engine", ["layerwise", "ddp"])
@pytest.mark.parametrize("derived", [False, True])
def test_global_hooks_see_the_whole_optimizer_once_a_step(engine: str, derived: bool) -> None:
    # torch itself runs them twice for a step that calls a wrapped one.
    times = 12 if derived else 6
    expected = (True, [(True, True)] * times)
    got = ranks.spawn(clipped_by_a_global_hook, 2, engine, "auto", derived, init=True)
    assert got == [expected] * 2


def test_a_global_pre_hook_makes_updates_deferred() -> None:
    optimizer = torch.optim.SGD(network().parameters(), lr=0.1)
    with pre_hook(clip):
        mode, reason = choose_mode(optimizer, "auto", clips=False, scales=False)
        assert (mode, "register_optimizer_step_pre_hook" in reason) == ("deferred", True)
        with pytest.raises(ConfigError, match="register_optimizer_step_pre_hook"):
            choose_mode(optimizer, "layerwise", clips=False, scales=False)


def test_a_global_post_hook_comes_after_each_layerwise_step() -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    order: list[str] = []
    optimizer.register_step_post_hook(lambda *_: order.append("own"))
    with (
        post_hook(lambda found, *_: order.append("global" if found is optimizer else "a clone")),
        sapwood.Run(model, optimizer, update="layerwise", **SMALL_BUCKETS) as run,  # type: ignore[arg-type]
    ):
        for _ in range(2):
            run.model(ONES).sum().backward()
            run.step()
    assert order == ["own", "global"] * 2


def test_a_global_pre_hook_that_comes_late_is_refused() -> None:
    parameters = list(network().parameters())
    views = Views(torch.optim.SGD(parameters, lr=0.1), None, "layerwise")
    with pre_hook(clip), pytest.raises(UsageError, match="register_optimizer_step_pre_hook"):
        views.follow()
    views.follow()


def test_a_late_global_hook_of_a_step_that_runs_it_per_bucket_is_refused() -> None:
    parameters = list(network().parameters())
    views = Views(Derived(parameters, lr=0.1), None, "deferred")
    with post_hook(clip), pytest.raises(UsageError, match="for each bucket"):
        views.follow()


def test_a_pre_hook_that_returns_other_arguments_is_refused() -> None:
    optimizer = torch.optim.SGD(network().parameters(), lr=0.1)
    views = Views(optimizer, None, "deferred")
    optimizer.register_step_pre_hook(lambda _, args, kwargs: (args, kwargs))
    views.before_step()
    optimizer.register_step_pre_hook(lambda _, args, kwargs: (args, {"closure": None}))
    with pytest.raises(UsageError, match="return None"):
        views.before_step()


# -- scalers ---------------------------------------------------------------------------------


def scaled(restored: bool, without: tuple[int, ...]) -> tuple[list[float], float]:
    """Train with a scaler; rank 1 has no batch in some steps, and nobody has one in step 3."""
    model = network()
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
    if restored:
        scaler.load_state_dict({**scaler.state_dict(), "scale": 4.0, "_growth_tracker": 1})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with sapwood.Run(model, optimizer, scaler=scaler, timeout=20.0) as run:
        for step in range(5):
            if step != 3 and (rank() == 0 or step not in without):
                scaler.scale(run.model(ONES).sum()).backward()
            run.step()
    return flat(model), scaler.get_scale()


def unscaled(without: tuple[int, ...]) -> list[float]:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(5):
        if step != 3:
            (model(ONES).sum() * (0.5 if step in without else 1.0)).backward()
            optimizer.step()
            optimizer.zero_grad()
    return flat(model)


def flat(model: nn.Module) -> list[float]:
    values: list[float] = torch.cat([p.detach().flatten() for p in model.parameters()]).tolist()
    return values


@pytest.mark.parametrize("restored", [False, True])
def test_a_rank_without_a_batch_in_the_first_step_has_a_scale(restored: bool) -> None:
    without = (0, 2)
    first, second = ranks.spawn(scaled, 2, restored, without, init=True)
    assert first == second
    assert first[0] == pytest.approx(unscaled(without), abs=1e-6)
    assert first[1] == (16.0 if restored else 32.0)  # 4 -> 8 -> 16; 8 -> 16 -> 32
