"""A view updates its parameters exactly as the whole optimizer would."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from sapwood.errors import ConfigError
from sapwood.sync.optim import Views, choose_mode, is_per_parameter

OPTIMIZERS: list[tuple[str, dict[str, Any]]] = [
    ("SGD", {"lr": 0.1}),
    ("SGD", {"lr": 0.1, "momentum": 0.9, "weight_decay": 1e-3, "nesterov": True}),
    ("SGD", {"lr": 0.1, "momentum": 0.9, "fused": True}),
    ("SGD", {"lr": 0.1, "momentum": 0.9, "foreach": False}),
    ("Adam", {"lr": 0.01}),
    ("Adam", {"lr": 0.01, "amsgrad": True, "weight_decay": 1e-2}),
    ("Adam", {"lr": 0.01, "fused": True}),
    ("AdamW", {"lr": 0.01}),
    ("AdamW", {"lr": 0.01, "fused": True}),
    ("NAdam", {"lr": 0.01}),
    ("RAdam", {"lr": 0.01}),
    ("Adamax", {"lr": 0.01}),
    ("Adagrad", {"lr": 0.01}),
    ("Adadelta", {}),
    ("RMSprop", {"lr": 0.01, "momentum": 0.9}),
    ("Rprop", {"lr": 0.01}),
    ("ASGD", {"lr": 0.01}),
    ("Adafactor", {"lr": 0.01}),
]


def parameters() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(3, n, generator=generator)) for n in (5, 17, 64, 1)]


@pytest.mark.parametrize(("name", "options"), OPTIMIZERS)
def test_views_together_equal_the_whole(name: str, options: dict[str, Any]) -> None:
    plain, viewed = parameters(), parameters()
    reference = getattr(torch.optim, name)(plain, **options)
    optimizer = getattr(torch.optim, name)(
        [{"params": viewed[:2]}, {"params": viewed[2:], **options}], **options
    )
    views = Views(optimizer, None, "layerwise")
    parts = [views.of([viewed[3], viewed[1]]), views.of([viewed[0], viewed[2]])]
    generator = torch.Generator().manual_seed(1)
    for step in range(6):
        for a, b in zip(plain, viewed, strict=True):
            a.grad = torch.randn(a.shape, generator=generator)
            b.grad = a.grad.clone()
        for group in (*reference.param_groups, *optimizer.param_groups):
            group["lr"] = 0.01 * (step + 1)
        reference.step()
        views.follow()
        for part in parts:
            part.step()
        assert all(torch.equal(a.grad, b.grad) for a, b in zip(plain, viewed, strict=True))
        assert all(b.grad._version == 0 for b in viewed)
    for a, b in zip(plain, viewed, strict=True):
        assert torch.equal(a, b)
        for key, value in reference.state[a].items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(optimizer.state[b][key]))


def test_state_loaded_later_is_followed() -> None:
    params = parameters()
    optimizer = torch.optim.SGD(params, lr=0.1, momentum=0.9)
    views = Views(optimizer, None, "layerwise")
    part = views.of(params)
    saved = optimizer.state_dict()
    saved["state"] = {0: {"momentum_buffer": torch.full((3, 5), 2.0)}}
    optimizer.load_state_dict(saved)
    before = params[0].detach().clone()
    for p in params:
        p.grad = torch.zeros_like(p)
    views.follow()
    part.step()
    assert torch.allclose(before - params[0], torch.full((3, 5), 0.1 * 0.9 * 2.0))


class Own(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)


class Declared(Own):
    per_parameter = True


class Untouched(torch.optim.AdamW):
    pass


def test_which_optimizers_update_each_parameter_by_itself() -> None:
    p = parameters()
    assert is_per_parameter(torch.optim.AdamW(p))
    assert is_per_parameter(Untouched(p))
    assert is_per_parameter(Declared(p, lr=0.1))
    assert not is_per_parameter(Own(p, lr=0.1))
    assert not is_per_parameter(torch.optim.SparseAdam(p))


@pytest.mark.parametrize(
    ("clips", "scales", "wanted", "mode"),
    [
        (False, False, "auto", "layerwise"),
        (True, False, "auto", "deferred"),
        (False, True, "auto", "deferred"),
        (False, False, "deferred", "deferred"),
    ],
)
def test_mode_is_chosen_by_what_needs_all_gradients(
    clips: bool, scales: bool, wanted: str, mode: str
) -> None:
    optimizer = torch.optim.SGD(parameters(), lr=0.1)
    assert choose_mode(optimizer, wanted, clips=clips, scales=scales)[0] == mode


def test_clipping_is_never_ignored() -> None:
    optimizer = torch.optim.SGD(parameters(), lr=0.1)
    with pytest.raises(ConfigError, match="clip_grad_norm"):
        choose_mode(optimizer, "layerwise", clips=True, scales=False)


def test_a_foreign_optimizer_updates_as_a_whole() -> None:
    optimizer = Own(parameters(), lr=0.1)
    assert choose_mode(optimizer, "auto", clips=False, scales=False)[0] == "whole"
    with pytest.raises(ConfigError, match="per_parameter"):
        choose_mode(optimizer, "layerwise", clips=False, scales=False)


def test_an_optimizer_that_needs_a_closure_is_refused() -> None:
    with pytest.raises(ConfigError, match="closure"):
        choose_mode(torch.optim.LBFGS(parameters()), "auto", clips=False, scales=False)


def test_fused_must_exist() -> None:
    with pytest.raises(ConfigError, match="no fused NAdam"):
        Views(torch.optim.NAdam(parameters()), True, "layerwise")
