"""Ranks that do not belong together: a clear error on every rank, and no hang."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import sapwood
from sapwood.errors import ConfigError, PeerFailed, UsageError
from sapwood.testing import ranks
from sapwood.testing.ranks import rank
from tests.sync import models

SGD = {"lr": 0.1, "momentum": 0.9}


def start(model: nn.Module, lr: float = 0.1, **settings: Any) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    with sapwood.Run(model, optimizer, timeout=30.0, **settings) as run:
        models.train_run_step(run, 0)


def other_width() -> None:
    start(models.mlp(width=16 + rank()))


def other_dtype() -> None:
    model = models.mlp()
    if rank() == 1:
        model[4].to(torch.bfloat16)
    start(model)


def other_order() -> None:
    layers = {"a": nn.Linear(16, 16), "b": nn.Linear(16, 16)}
    names = ("a", "b") if rank() == 0 else ("b", "a")
    start(nn.Sequential(*[nn.ModuleDict({n: layers[n]}) for n in names]))


def other_lr() -> None:
    start(models.mlp(), lr=0.1 + 0.1 * rank())


def other_setting() -> None:
    start(models.mlp(), bucket_mb=1.0 + rank())


def other_frozen() -> None:
    model = models.mlp()
    if rank() == 2:
        model[0].requires_grad_(False)
    start(model)


def foreign_parameter() -> None:
    model = models.mlp()
    held = [nn.Parameter(torch.zeros(2, 9))] if rank() == 1 else model.parameters()
    with sapwood.Run(model, torch.optim.SGD(held, lr=0.1), timeout=30.0):
        pass


REFUSED: dict[str, tuple[Callable[[], None], int, str]] = {
    "width": (other_width, 2, r"rank 0 has \[parameter 0.weight: shape \(16, 16\).*\(17, 17\)"),
    "dtype": (other_dtype, 2, r"4.weight.*float32.*rank 1 has .*bfloat16"),
    "order": (other_order, 2, r"0\.a\.weight.*0\.b\.weight"),
    "learning rate": (other_lr, 2, r"'lr': 0.1.*'lr': 0.2"),
    "setting": (other_setting, 2, r"bucket_mb = 1.0.*bucket_mb = 2.0"),
    "frozen": (other_frozen, 3, r"0.weight.*trained.*rank 2 has.*frozen"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_ranks_that_differ_are_refused_at_start(name: str) -> None:
    function, count, pattern = REFUSED[name]
    outcomes = ranks.spawn(function, count, expect_errors=True, timeout=100)
    for outcome in outcomes:
        assert outcome.error_type == "MismatchError"
        with pytest.raises(AssertionError, match=pattern):
            raise AssertionError(outcome.error)


def test_one_ranks_own_mistake_reaches_the_others() -> None:
    others, culprit = ranks.spawn(foreign_parameter, 2, expect_errors=True, timeout=100)
    assert culprit.error_type == "ConfigError"
    assert others.error_type == "PeerFailed"
    assert "rank 1 failed: ConfigError" in others.error
    assert "(2, 9)" in others.error


def twice(kind: str) -> None:
    if kind == "reentrant":
        model = models.seeded(lambda: models.Shared(reentrant=True))
        start(model)
    model = models.mlp()
    with sapwood.Run(model, torch.optim.SGD(model.parameters(), **SGD), timeout=30.0) as run:
        x, y = models.batch(0, rank())
        for _ in range(2):
            if kind == "one rank only" and rank() == 0 and run.model(x) is None:
                return
            models.loss_of(run.model(x), y).backward()
            if kind == "one rank only" and rank() == 0:
                run.step()


@pytest.mark.parametrize("kind", ["all ranks", "reentrant"])
def test_what_no_engine_can_do_is_refused_on_every_rank(kind: str) -> None:
    outcomes = ranks.spawn(twice, 2, kind, expect_errors=True, timeout=100)
    # A slower rank may hear of the other's refusal before it comes to its own.
    assert "UsageError" in {outcome.error_type for outcome in outcomes}
    for outcome in outcomes:
        assert outcome.error_type in ("UsageError", "PeerFailed")
        expected = "use_reentrant=False" if kind == "reentrant" else "run.step()"
        assert expected in outcome.error


def test_backward_twice_on_one_rank_reaches_the_other() -> None:
    other, culprit = ranks.spawn(twice, 2, "one rank only", expect_errors=True, timeout=100)
    assert culprit.error_type == "UsageError"
    assert other.error_type == "PeerFailed"
    assert "run.step()" in other.error


def clip_too_late() -> None:
    model = models.mlp()
    with sapwood.Run(model, torch.optim.SGD(model.parameters(), **SGD), timeout=30.0) as run:
        x, y = models.batch(0, rank())
        models.loss_of(run.model(x), y).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        run.step()


def test_clipping_by_hand_is_never_ignored() -> None:
    for outcome in ranks.spawn(clip_too_late, 2, expect_errors=True, timeout=100):
        assert outcome.error_type == "UsageError"
        assert "clip_grad_norm" in outcome.error


def thaw_one_rank() -> None:
    model = models.mlp()
    model[0].requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), **SGD)
    with sapwood.Run(model, optimizer, timeout=3.0) as run:
        models.train_run_step(run, 0)
        if rank() == 1:
            model[0].requires_grad_(True)
        models.train_run_step(run, 1)


def test_thawing_on_one_rank_only_is_an_error_on_both() -> None:
    for outcome in ranks.spawn(thaw_one_rank, 2, expect_errors=True, timeout=100):
        assert outcome.error_type == "PeerFailed"


# -- what is not for a Run, or not twice ---------------------------------------------------------


def wrapped_in_ddp() -> None:
    start(nn.parallel.DistributedDataParallel(models.mlp()))


def wrapped_in_ddp_and_compiled() -> None:
    start(torch.compile(nn.parallel.DistributedDataParallel(models.mlp()), backend="eager"))


def sharded() -> None:
    model = models.mlp()
    fully_shard(model, mesh=init_device_mesh("cpu", (ranks.world(),)))
    start(model)


def distributed() -> None:
    model = models.mlp()
    mesh = init_device_mesh("cpu", (ranks.world(),))
    start(parallelize_module(model, mesh, {"0": ColwiseParallel()}))


def unused_under_ddp() -> None:
    model = models.seeded(models.Branches)
    model.use = ("left",)
    optimizer = torch.optim.SGD(model.parameters(), **SGD)
    with sapwood.Run(model, optimizer, timeout=30.0, engine="ddp") as run:
        for step in range(2):
            models.train_run_step(run, step)


def accumulate_under_ddp() -> None:
    model = models.mlp()
    optimizer = torch.optim.SGD(model.parameters(), **SGD)
    with sapwood.Run(model, optimizer, timeout=30.0, engine="ddp") as run:
        x, y = models.batch(0, rank())
        loss = models.loss_of(run.model(x), y)
        with run.accumulate():
            loss.backward()
        models.loss_of(run.model(x), y).backward()
        run.step()


MODULE = r"\.module|without|itself|unwrapped|plain|inside"
FOREIGN: dict[str, tuple[Callable[[], None], str, str]] = {
    "DistributedDataParallel": (wrapped_in_ddp, r"DistributedDataParallel|DDP", MODULE),
    "compiled DistributedDataParallel": (
        wrapped_in_ddp_and_compiled,
        r"DistributedDataParallel|DDP",
        MODULE,
    ),
    "fully_shard": (sharded, r"fully_shard|FSDP", r"without|unsharded|plain|instead|whole"),
    "DTensor": (distributed, r"DTensor", r"without|plain|instead|local|ordinary|whole"),
    "unused parameter, engine ddp": (unused_under_ddp, r"right\.(weight|bias)", r"layerwise"),
    "accumulate around backward, engine ddp": (
        accumulate_under_ddp,
        r"accumulate\(\)",
        r"forward\b.*(as well|too|inside|around)|(inside|around).*forward\b",
    ),
}


@pytest.mark.parametrize("name", FOREIGN)
def test_what_is_not_for_a_run_is_refused_by_name_with_the_remedy(name: str) -> None:
    function, thing, remedy = FOREIGN[name]
    outcomes = ranks.spawn(function, 2, init=True, expect_errors=True, timeout=100)
    if function is accumulate_under_ddp and all(o.error_type is None for o in outcomes):
        return  # it works: tests/parity looks at the result
    for outcome in outcomes:
        # PeerFailed: the other rank was quicker, and said why.
        assert outcome.error_type in {"ConfigError", "UsageError", "PeerFailed"}, outcome.error
        message = outcome.error.rstrip().rpartition("\nsapwood.errors.")[2]
        for pattern in (thing, remedy):
            with pytest.raises(AssertionError, match=f"(?s){pattern}"):
                raise AssertionError(message)


def test_a_second_run_on_one_model_or_optimizer_is_refused_until_the_first_is_closed() -> None:
    model, other = models.mlp(), models.mlp()
    optimizer = torch.optim.SGD(model.parameters(), **SGD)
    second = torch.optim.SGD(model.parameters(), **SGD)
    with sapwood.Run(model, optimizer) as run:
        for made_from in (optimizer, second):
            with pytest.raises((ConfigError, UsageError), match=r"close\(\)"):
                sapwood.Run(model, made_from)
        models.train_run_step(run, 0)  # the refusal has not harmed the first one
    optimizer.add_param_group({"params": list(other.parameters())})
    both = nn.ModuleList([model, other])
    with sapwood.Run(both, optimizer):
        with pytest.raises((ConfigError, UsageError), match=r"close\(\)"):
            sapwood.Run(model, second)  # a part of a model that a Run trains
        with pytest.raises((ConfigError, UsageError), match=r"close\(\)"):
            sapwood.Run(nn.ModuleList([model, other]), optimizer)
    with sapwood.Run(model, second) as run:
        models.train_run_step(run, 1)


def test_a_run_that_failed_to_start_does_not_hold_its_model() -> None:
    model = models.mlp()
    optimizer = torch.optim.SGD(model.parameters(), **SGD)
    foreign = torch.optim.SGD([nn.Parameter(torch.zeros(2))], lr=0.1)
    with pytest.raises(ConfigError):
        sapwood.Run(model, foreign)
    with sapwood.Run(model, optimizer) as run:
        models.train_run_step(run, 0)


def test_a_scheduler_that_needs_a_metric_is_refused_at_once() -> None:
    model = models.mlp()
    optimizer = torch.optim.SGD(model.parameters(), **SGD)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    with pytest.raises((ConfigError, UsageError), match=r"ReduceLROnPlateau(?s:.*)step\("):
        sapwood.Run(model, optimizer, schedulers=[plateau])
    with sapwood.Run(model, optimizer) as run:  # stepped by the loop, as the message says
        models.train_run_step(run, 0)
        plateau.step(1.0)
        models.train_run_step(run, 1)


def _look(look: Callable[[torch.Tensor], object], head: nn.Parameter, _: torch.Tensor) -> None:
    assert head.grad is not None
    look(head.grad)


def look_during_backward() -> list[str]:
    """Hooks of other layers that look at a gradient which has been handed over for averaging."""
    said = []
    looks: dict[str, Callable[[torch.Tensor], object]] = {
        "value": lambda gradient: gradient.norm(),
        "change": lambda gradient: gradient.mul_(2.0),
        "alias": lambda gradient: gradient.data,
        "harmless": lambda gradient: (gradient.shape, gradient.dtype, gradient.numel()),
    }
    for name, look in looks.items():
        for update in ("layerwise", "deferred"):
            model = models.mlp()
            head, first = model[-1].weight, model[0].weight
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            run = sapwood.Run(model, optimizer, timeout=30.0, update=update)
            first.register_hook(partial(_look, look, head))
            try:
                models.train_run_step(run, 0)
                said.append(f"{name} {update}: works")
            except UsageError as error:
                clear = "hook of the parameter itself" in str(error)
                said.append(f"{name} {update}: {'refused' if clear else error}")
            except PeerFailed:  # the other rank was quicker
                said.append(f"{name} {update}: refused")
            finally:
                run.close()
    return said


def test_a_hook_that_looks_at_a_gradient_on_its_way_is_refused() -> None:
    want = [
        f"{name} {update}: {'refused' if update == 'layerwise' and name != 'harmless' else 'works'}"
        for name in ("value", "change", "alias", "harmless")
        for update in ("layerwise", "deferred")
    ]
    assert ranks.spawn(look_during_backward, 2, timeout=100) == [want, want]


def replace_a_layer(model: nn.Module) -> None:
    model[0] = nn.Linear(16, 16)  # type: ignore[operator]


@pytest.mark.parametrize("update", ["auto", "deferred"])
@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda model: model.double(), r"float64.*close the Run"),
        (replace_a_layer, r"no longer in the model.*close the Run"),
    ],
)
def test_a_model_that_is_changed_under_its_run(change, told: str, update: str) -> None:
    model = models.mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with sapwood.Run(model, optimizer, update=update) as run:
        models.train_run_step(run, 0)
        change(model)
        x, y = models.batch(1)
        x = x.to(model[0].weight.dtype)

        def one_step() -> None:
            models.loss_of(run.model(x), y).backward()
            run.step()

        with pytest.raises(UsageError, match=told):
            one_step()


def test_an_exception_that_skipped_the_step_is_suspected() -> None:
    model = models.mlp()
    with sapwood.Run(model, torch.optim.SGD(model.parameters(), lr=0.1)) as run:
        x, y = models.batch(0)
        models.loss_of(run.model(x), y).backward()
        with pytest.raises(UsageError, match=r"exception may have skipped run\.step\(\)"):
            models.loss_of(run.model(x), y).backward()
