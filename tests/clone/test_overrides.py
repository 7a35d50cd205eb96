"""What can be changed in a fork is checked before anybody is asked for one."""

from __future__ import annotations

import copy
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as torchs

from sapwood.clone.kinds import check_kinds
from sapwood.clone.overrides import apply_overrides, check_overrides
from sapwood.errors import CloneError, ConfigError
from sapwood.state.contents import collect
from sapwood.state.kinds import group_members, name_of, name_of_scheduler


def made(name: str, **options: Any) -> torch.optim.Optimizer:
    first, second = nn.Parameter(torch.zeros(2, 3)), nn.Parameter(torch.zeros(3))
    groups = [{"params": [first]}, {"params": [second]}]
    optimizer: torch.optim.Optimizer = getattr(torch.optim, name)(groups, lr=0.1, **options)
    return optimizer


ALWAYS_WRONG = [
    ("optimizer.lr", -1, "optimizer.lr is -1, expected a number, 0 or more"),
    ("optimizer.lr", "abc", "optimizer.lr is 'abc', expected a number"),
    ("optimizer.lr", float("nan"), "is nan, expected a number"),
    ("optimizer.lr", float("inf"), "is inf, expected a number"),
    ("optimizer.lr", True, "is True, expected a number"),
    ("optimizer.lr", None, "is None, expected a number, 0 or more"),
    ("optimizer.lr", [0.1, 0.2], "expected a number, 0 or more"),
    ("optimizer.1.lr", -0.5, "optimizer.1.lr is -0.5, expected a number, 0 or more"),
    ("optimizer.weight_decay", -1, "expected a number, 0 or more"),
    ("optimizer.betas", [0.9], "expected two numbers below 1"),
    ("optimizer.betas", [0.9, 1.5], "expected two numbers below 1"),
    ("optimizer.anything", float("nan"), "is nan, expected a number"),
    ("optimizer", 0.1, r"expected optimizer.NAME"),
    ("optimizer.", 0.1, r"expected optimizer.NAME"),
    ("optimizer.x.lr", 0.1, r"expected optimizer.NAME"),
    ("optimizer.0.lr.x", 0.1, r"expected optimizer.NAME"),
    ("optimizer.params", 0.1, r"expected optimizer.NAME"),
    ("optimiser.lr", 0.1, r"did you mean optimizer.lr\?"),
    ("Optimizer.lr", 0.1, r"did you mean optimizer.lr\?"),
    ("optimzer.0.lr", 0.1, r"did you mean optimizer.0.lr\?"),
    ("scheduler.T_max", 100, "There is optimizer.lr"),
    ("schedulers.0.gamma", 0.1, "goes on with its parent's schedules"),
    ("schedular.T_max", 100, r"did you mean scheduler.T_max\?"),
]


@pytest.mark.parametrize(("path", "value", "message"), ALWAYS_WRONG)
def test_wrong_whatever_the_optimizer(path: str, value: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_overrides({path: value})
    with pytest.raises(ConfigError, match=message):
        check_overrides({"data.seed": 1, path: value}, made("AdamW"))


WRONG_FOR: list[tuple[str, dict[str, Any], str, Any, str]] = [
    ("AdamW", {}, "optimizer.lrr", 0.1, "optimizer.lrr leads nowhere; .*groups have .*betas.*lr"),
    ("AdamW", {}, "optimizer.2.lr", 0.1, "leads nowhere; there are 2 parameter groups"),
    ("AdamW", {}, "optimizer.eps", [1e-8, 1e-8], "expected a number"),
    ("AdamW", {}, "optimizer.amsgrad", 1, "is 1, expected true or false"),
    ("AdamW", {}, "optimizer.amsgrad", True, "with the state the run has.*max_exp_avg_sq"),
    ("AdamW", {}, "optimizer.fused", True, "which a fork does not change: set it in the script"),
    ("SGD", {}, "optimizer.nesterov", True, "Nesterov momentum requires a momentum"),
    ("SGD", {}, "optimizer.betas", [0.9, 0.9], "leads nowhere"),
    ("RMSprop", {}, "optimizer.momentum", 0.9, "with the state the run has.*momentum_buffer"),
    ("RMSprop", {}, "optimizer.alpha", -0.1, "Invalid alpha value"),
    ("Adadelta", {}, "optimizer.rho", 2.0, "Invalid rho value"),
    ("Rprop", {}, "optimizer.etas", [1.5, 0.5], "Invalid eta values"),
]


@pytest.mark.parametrize(("name", "options", "path", "value", "message"), WRONG_FOR)
def test_wrong_for_this_optimizer(
    name: str, options: dict[str, Any], path: str, value: Any, message: str
) -> None:
    optimizer = made(name, **options)
    before = copy.deepcopy(optimizer.state_dict())
    check_overrides({path: value})  # nothing the command line can know
    with pytest.raises(ConfigError, match=message):
        check_overrides({path: value}, optimizer)
    assert optimizer.state_dict() == before


RIGHT: list[tuple[str, dict[str, Any], str, Any, Any]] = [
    ("AdamW", {}, "optimizer.lr", 1, 1.0),
    ("AdamW", {}, "optimizer.lr", 0, 0.0),
    ("AdamW", {}, "optimizer.betas", [0.8, 0.95], (0.8, 0.95)),
    ("AdamW", {}, "optimizer.weight_decay", 0.5, 0.5),
    ("AdamW", {"amsgrad": True}, "optimizer.amsgrad", False, False),
    ("SGD", {}, "optimizer.momentum", 0.9, 0.9),
    ("SGD", {"momentum": 0.9}, "optimizer.nesterov", True, True),
    ("SGD", {}, "optimizer.maximize", True, True),
    ("Muon", {}, "optimizer.ns_steps", 3, 3),
    ("Muon", {}, "optimizer.adjust_lr_fn", "match_rms_adamw", "match_rms_adamw"),
    ("Adafactor", {}, "optimizer.eps", [None, 0.01], (None, 0.01)),
    ("SparseAdam", {}, "optimizer.lr", 0.2, 0.2),
]


@pytest.mark.parametrize(("name", "options", "path", "value", "wanted"), RIGHT)
def test_what_an_optimizer_takes_is_set_in_its_own_type(
    name: str, options: dict[str, Any], path: str, value: Any, wanted: Any
) -> None:
    optimizer = (
        made(name, **options)
        if name != "Muon"
        else torch.optim.Muon([nn.Parameter(torch.zeros(2, 3))], lr=0.1)
    )
    check_overrides({path: value})
    check_overrides({path: value}, optimizer)
    apply_overrides({path: value}, optimizer, [])
    option = path.rpartition(".")[2]
    for group in optimizer.param_groups:
        assert group[option] == wanted
        assert type(group[option]) is type(wanted)


def test_options_that_only_together_make_sense() -> None:
    together = {"optimizer.nesterov": True, "optimizer.momentum": 0.9}
    check_overrides(together, made("SGD"))
    with pytest.raises(ConfigError, match=r"optimizer\.nesterov=True"):
        check_overrides({"optimizer.nesterov": True}, made("SGD"))


def test_an_option_of_the_script_s_own() -> None:
    check_overrides({"schedule.warmup": 3, "data.seed": "x", "lr": [1]}, made("SGD"))
    optimizer = made("SGD")
    optimizer.param_groups[1]["layer"] = "head"
    check_overrides({"optimizer.1.layer": "neck"}, optimizer)
    with pytest.raises(ConfigError, match="expected text, as in 'head'"):
        check_overrides({"optimizer.1.layer": 3}, optimizer)


class Picky(torch.optim.SGD):
    """An optimizer of the user's, with a rule of its own, whose step must not be tried out."""

    def __init__(self, params: Any, lr: float, momentum: float = 0.0) -> None:
        if momentum > 0.5:
            raise ValueError("momentum is too large for this optimizer")
        super().__init__(params, lr=lr, momentum=momentum)

    def step(self, closure: Any = None) -> Any:
        raise AssertionError("it may send messages")


class NotFromOptions(torch.optim.SGD):
    def __init__(self, model: nn.Module) -> None:
        super().__init__(model.parameters(), lr=0.1)


def test_optimizers_of_the_user_s() -> None:
    picky = Picky([nn.Parameter(torch.zeros(2))], lr=0.1)
    check_overrides({"optimizer.momentum": 0.4}, picky)
    with pytest.raises(ConfigError, match="momentum is too large"):
        check_overrides({"optimizer.momentum": 0.9}, picky)
    check_overrides({"optimizer.lr": 0.4}, NotFromOptions(nn.Linear(2, 2)))


def test_the_command_line_can_check_without_torch() -> None:
    code = (
        "import sys; from sapwood.clone.overrides import check_overrides; "
        "check_overrides({'optimizer.lr': 0.1}); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# -- what must be the same on both sides -----------------------------------------------------


def manifest_of(optimizer: torch.optim.Optimizer, model: nn.Module, schedulers: Any = ()) -> Any:
    contents = collect(model, optimizer, lambda name: (0,))
    place = {entry.key: n for n, entry in enumerate(contents.catalog.entries)}
    groups = [
        [place["model", n] for n in names]
        for names in group_members(contents.parameters, optimizer)
    ]
    return SimpleNamespace(
        optimizer=name_of(type(optimizer)),
        groups=groups,
        catalog=contents.catalog.to_json(),
        schedulers=[name_of_scheduler(one) for one in schedulers],
    )


def layers() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))


def test_other_groups_and_other_schedulers_are_refused(caplog: pytest.LogCaptureFixture) -> None:
    model = layers()
    first, second = (list(part.parameters()) for part in model.children())
    optimizer = torch.optim.SGD([{"params": first}, {"params": second}], lr=0.1)
    steps = [torchs.StepLR(optimizer, 3), torchs.ExponentialLR(optimizer, 0.9)]
    manifest = manifest_of(optimizer, model, steps)
    check_kinds(manifest, model, optimizer, steps)
    frozen = torch.optim.SGD([{"params": first[:1]}, {"params": second}], lr=0.1)
    check_kinds(manifest, model, frozen, steps)
    assert not caplog.records

    with pytest.raises(CloneError, match="has 1 parameter groups, the run to be cloned 2"):
        check_kinds(manifest, model, torch.optim.SGD(first + second, lr=0.1), steps)
    swapped = torch.optim.SGD([{"params": second}, {"params": first}], lr=0.1)
    with pytest.raises(CloneError, match=r"1\.weight is in group 0, in the run in group 1"):
        check_kinds(manifest, model, swapped, steps)
    with pytest.raises(CloneError, match=r"scheduler 0 of the run is .*StepLR, of this.*LambdaLR"):
        check_kinds(manifest, model, optimizer, [torchs.LambdaLR(optimizer, lambda epoch: 1.0)])
    chained = torchs.ChainedScheduler([torchs.StepLR(optimizer, 3)])
    other = torchs.ChainedScheduler([torchs.ConstantLR(optimizer)])
    with pytest.raises(CloneError, match=r"ChainedScheduler\(torch.optim.lr_scheduler.StepLR\)"):
        check_kinds(manifest_of(optimizer, model, [chained]), model, optimizer, [other])
    check_kinds(manifest, model, optimizer, steps[:1])
    assert "ExponentialLR" in caplog.text


def test_a_class_of_the_script_is_the_same_however_the_script_was_started() -> None:
    model = layers()
    optimizer = Picky(model.parameters(), lr=0.1)
    manifest = manifest_of(optimizer, model)
    manifest.optimizer = "__main__.Picky"
    check_kinds(manifest, model, optimizer, [])
    manifest.optimizer = "__main__.Other"
    with pytest.raises(CloneError, match=r"trains with __main__.Other, this script has .*Picky"):
        check_kinds(manifest, model, optimizer, [])
