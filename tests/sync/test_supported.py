"""What a Run cannot train is refused by name, before the first step, with the remedy."""

from __future__ import annotations

import gc
import re
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import sapwood
from sapwood.errors import ConfigError, PeerFailed, UsageError
from sapwood.testing import ranks
from tests.sync import models


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


# -- schedulers --------------------------------------------------------------------------------


def test_a_scheduler_that_needs_a_metric_is_refused_with_the_way_to_step_it() -> None:
    model = models.mlp()
    optimizer = sgd(model)
    plateau = lr_scheduler.ReduceLROnPlateau(optimizer)
    with pytest.raises(ConfigError, match=r"ReduceLROnPlateau.*metrics.*yourself"):
        sapwood.Run(model, optimizer, schedulers=[plateau])


def test_a_plateau_stepped_by_hand_is_followed() -> None:
    plain, ours = models.mlp(), models.mlp()

    def plateau(optimizer: torch.optim.Optimizer) -> lr_scheduler.ReduceLROnPlateau:
        return lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)

    optimizer = sgd(plain)
    scheduler = plateau(optimizer)
    for step in range(4):
        models.train_plain_step(plain, optimizer, step)
        scheduler.step(1.0)
    optimizer = sgd(ours)
    with sapwood.Run(ours, optimizer) as run:
        scheduler = plateau(optimizer)
        for step in range(4):
            models.train_run_step(run, step)
            scheduler.step(1.0)
    assert optimizer.param_groups[0]["lr"] < 0.1
    assert models.same(models.weights(plain), models.weights(ours))


def test_one_scheduler_without_a_list_is_named() -> None:
    model = models.mlp()
    optimizer = sgd(model)
    with pytest.raises(ConfigError, match=r"StepLR, expected a list"):
        sapwood.Run(model, optimizer, schedulers=lr_scheduler.StepLR(optimizer, 1))  # type: ignore[arg-type]


def test_a_scheduler_of_another_optimizer_is_refused() -> None:
    model = models.mlp()
    other = lr_scheduler.StepLR(sgd(models.mlp()), 1)
    with pytest.raises(ConfigError, match=r"StepLR was made for another optimizer"):
        sapwood.Run(model, sgd(model), schedulers=[other])


# -- settings and flags ------------------------------------------------------------------------


def test_a_clip_of_zero_is_no_clipping() -> None:
    plain, ours = models.mlp(), models.mlp()
    models.train_plain(plain, sgd(plain), 2)
    with sapwood.Run(ours, sgd(ours), clip_grad_norm=0.0) as run:
        assert run.update_mode == "layerwise"
        for step in range(2):
            models.train_run_step(run, step)
    assert models.same(models.weights(plain), models.weights(ours))


@pytest.mark.parametrize("value", [-1.0, float("nan"), False])
def test_other_strange_clips_are_refused(value: Any) -> None:
    model = models.mlp()
    with pytest.raises(ConfigError, match="clip_grad_norm"):
        sapwood.Run(model, sgd(model), clip_grad_norm=value)


def test_accumulation_by_a_flag_is_as_by_a_context() -> None:
    plain, ours = models.mlp(), models.mlp()
    models.train_plain(plain, sgd(plain), 3, accumulate=3)
    with sapwood.Run(ours, sgd(ours)) as run:
        for step in range(3):
            for part in range(3):
                x, y = models.batch(step * 3 + part)
                with run.accumulate(active=part < 2):
                    models.loss_of(run.model(x), y).backward()
            run.step()
    assert models.same(models.weights(plain), models.weights(ours))


def test_an_inactive_accumulate_inside_an_active_one_changes_nothing() -> None:
    model = models.mlp()
    with sapwood.Run(model, sgd(model)) as run:
        before = models.weights(model)
        with run.accumulate(), run.accumulate(active=False):
            x, y = models.batch(0)
            models.loss_of(run.model(x), y).backward()
        run.wait()
        assert models.same(before, models.weights(model))
        models.train_run_step(run, 1)


# -- kinds of models and optimizers ------------------------------------------------------------


def data_parallel() -> nn.Module:
    return nn.DataParallel(models.mlp())


def lazy() -> nn.Module:
    return nn.Sequential(nn.LazyLinear(4))


def scripted() -> nn.Module:
    return torch.jit.script(models.mlp())


def part_in_data_parallel() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 16), nn.DataParallel(nn.Linear(16, 4)))


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "DataParallel": (data_parallel, r"the model is wrapped in DataParallel; pass its \.module"),
    "a part": (part_in_data_parallel, r"its part 1 is wrapped in DataParallel"),
    "lazy": (lazy, r"0\.weight has no shape yet.*call the model once"),
    "script": (scripted, r"torch\.jit\.script\(\); pass the plain module"),
}


@pytest.mark.parametrize("kind", REFUSED)
@pytest.mark.filterwarnings("ignore")
def test_kinds_of_models(kind: str) -> None:
    build, message = REFUSED[kind]
    model = build()
    with pytest.raises(ConfigError, match=message):
        sapwood.Run(model, sgd(model))


def test_what_is_no_module_or_optimizer() -> None:
    model = models.mlp()
    with pytest.raises(ConfigError, match=r"a function, expected a torch\.nn\.Module"):
        sapwood.Run(lambda x: x, sgd(model))  # type: ignore[arg-type]
    scheduler = lr_scheduler.StepLR(sgd(model), 1)
    with pytest.raises(ConfigError, match=r"a StepLR, expected a torch\.optim\.Optimizer"):
        sapwood.Run(model, scheduler)  # type: ignore[arg-type]


def test_what_is_no_scheduler_or_scaler() -> None:
    model = models.mlp()
    with pytest.raises(ConfigError, match=r"schedulers is a int, expected a list"):
        sapwood.Run(model, sgd(model), schedulers=3)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"scaler is a bool, expected a torch\.amp\.GradScaler"):
        sapwood.Run(model, sgd(model), scaler=True)  # type: ignore[arg-type]


def test_an_empty_folder_for_runs_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = models.mlp()
    with pytest.raises(ConfigError, match="folder is '', expected a folder"):
        sapwood.Run(model, sgd(model), folder="")
    monkeypatch.setenv("SAPWOOD_RUN_FOLDER", "")
    with pytest.raises(ConfigError, match="folder is '', expected a folder"):
        sapwood.Run(model, sgd(model))


def wrapped() -> dict[str, str]:
    """What is said of each kind, in one group of ranks."""
    import torch.distributed as dist
    from torch.distributed._composable.replicate import replicate
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.distributed.tensor import Replicate, distribute_module, distribute_tensor
    from torch.nn.parallel import DistributedDataParallel

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    with_buffer = models.mlp()
    with_buffer.register_buffer("scale", distribute_tensor(torch.ones(4), mesh, [Replicate()]))
    kinds: dict[str, Any] = {
        "DistributedDataParallel": DistributedDataParallel(models.mlp()),
        "compiled DDP": torch.compile(DistributedDataParallel(models.mlp()), backend="eager"),
        "replicate": replicate(models.mlp()),
        "FSDP": FullyShardedDataParallel(models.mlp(), device_id=torch.device("cpu")),
        "fully_shard": fully_shard(models.mlp(), mesh=mesh),
        "DTensor": distribute_module(models.mlp(), mesh),
        "DTensor buffer": with_buffer,
        "ZeRO": models.mlp(),
    }
    said = {}
    for kind, model in kinds.items():
        optimizer = sgd(model)
        if kind == "ZeRO":
            optimizer = ZeroRedundancyOptimizer(
                model.parameters(), optimizer_class=torch.optim.SGD, lr=0.1
            )
        try:
            sapwood.Run(model, optimizer, timeout=30.0)
        except (ConfigError, PeerFailed) as error:  # whichever rank comes first tells the other
            said[kind] = str(error)
    return said


WRAPPED = {
    "DistributedDataParallel": r"wrapped in DistributedDataParallel; pass the plain module",
    "compiled DDP": r"wrapped in DistributedDataParallel; pass the plain module",
    "replicate": r"passed through replicate\(\); pass the plain module",
    "FSDP": r"wrapped in FullyShardedDataParallel; pass the plain module",
    "fully_shard": r"sharded with fully_shard\(\); leave fully_shard\(\) away",
    "DTensor": r"0\.weight is a DTensor.*whole on every rank",
    "DTensor buffer": r"scale is a DTensor",
    "ZeRO": r"ZeroRedundancyOptimizer: every rank must hold the whole optimizer state",
}


def test_what_others_synchronise_or_shard() -> None:
    for said in ranks.spawn(wrapped, 2, init=True, timeout=110):
        assert said.keys() == WRAPPED.keys()
        for kind, message in WRAPPED.items():
            assert re.search(message, said[kind])


# -- a second Run ------------------------------------------------------------------------------


def test_a_second_run_on_one_model_names_the_first() -> None:
    model = models.mlp()
    with sapwood.Run(model, sgd(model), id="first") as run:
        with pytest.raises(UsageError, match=r"run first trains this model.*run\.close"):
            sapwood.Run(model, sgd(model))
        with pytest.raises(UsageError, match=r"run first trains this model"):
            sapwood.Run(torch.compile(model, backend="eager"), sgd(model))  # type: ignore[arg-type]
        models.train_run_step(run, 0)
    with sapwood.Run(model, sgd(model)) as run:
        models.train_run_step(run, 1)


def test_a_second_run_on_one_optimizer_is_refused() -> None:
    both = nn.Sequential(models.mlp(), models.mlp())
    optimizer = sgd(both)
    with (
        sapwood.Run(both, optimizer, id="first"),
        pytest.raises(UsageError, match="run first trains with this optimizer"),
    ):
        sapwood.Run(nn.Sequential(both), optimizer)


def test_two_models_with_common_parameters() -> None:
    encoder, first, second = nn.Linear(16, 16), nn.Linear(16, 4), nn.Linear(16, 4)
    left, right = nn.Sequential(encoder, first), nn.Sequential(encoder, second)
    with sapwood.Run(left, sgd(left), id="left") as run:
        message = r"run left trains 2 of these parameters already \(0\.bias\)"
        with pytest.raises(UsageError, match=message):
            sapwood.Run(right, sgd(right))
        # Whoever leaves the common part to the other one may train beside it.
        encoder.requires_grad_(True)
        with sapwood.Run(right, sgd(second)) as beside:
            assert beside.id != run.id


def test_a_run_that_failed_to_start_holds_nothing() -> None:
    model = models.mlp()
    optimizer = sgd(model)
    with pytest.raises(ConfigError) as kept:  # as a notebook keeps the last traceback
        sapwood.Run(model, optimizer, update="layerwise", clip_grad_norm=1.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sapwood.run.make_engine", refuse)
        with pytest.raises(ConfigError, match="no engine today"):
            sapwood.Run(model, optimizer)
    models.train_plain(model, optimizer, 1)  # optimizer.step() is the user's own again
    with sapwood.Run(model, optimizer) as run:
        models.train_run_step(run, 0)
    assert kept.value


def refuse(context: object) -> None:
    raise ConfigError("no engine today")


def test_a_run_that_was_lost_is_closed() -> None:
    plain, model = models.mlp(), models.mlp()
    optimizer, expected = sgd(model), models.train_plain(plain, sgd(plain), 2)

    def lose() -> None:
        models.train_run_step(sapwood.Run(model, optimizer), 0)

    threads = set(threading.enumerate())
    lose()
    gc.collect()
    assert set(threading.enumerate()) <= threads
    with sapwood.Run(model, optimizer) as run:
        assert models.train_run_step(run, 1) == expected[1:]
    assert models.same(models.weights(plain), models.weights(model))


def second_on_one_rank() -> None:
    models_of_rank = [models.mlp(), models.mlp()]
    first = sapwood.Run(models_of_rank[0], sgd(models_of_rank[0]), id="first", timeout=30.0)
    again = models_of_rank[0 if ranks.rank() == 1 else 1]
    with first, sapwood.Run(again, sgd(again), timeout=30.0):
        pass


def wrapped_on_one_rank() -> None:
    model: nn.Module = models.mlp()
    if ranks.rank() == 1:
        model = nn.DataParallel(model)
    sapwood.Run(model, sgd(model), timeout=30.0)


@pytest.mark.parametrize(
    ("function", "kind", "message"),
    [
        (second_on_one_rank, "UsageError", "run first trains this model already"),
        (wrapped_on_one_rank, "ConfigError", "wrapped in DataParallel"),
    ],
)
def test_a_refusal_on_one_rank_reaches_the_other(
    function: Callable[[], None], kind: str, message: str
) -> None:
    other, culprit = ranks.spawn(function, 2, expect_errors=True, timeout=100)
    assert (other.error_type, culprit.error_type) == ("PeerFailed", kind)
    assert message in culprit.error
    assert message in other.error
