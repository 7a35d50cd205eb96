"""The predicted order of gradients is the order they really come in."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from sapwood.sync.order import graph_roots, ready_order
from sapwood.testing import workloads
from tests.sync import models


def actual_order(parameters: list[nn.Parameter], loss: Tensor) -> list[int]:
    fired: list[int] = []
    handles = [
        p.register_post_accumulate_grad_hook(lambda _, i=i: fired.append(i))
        for i, p in enumerate(parameters)
    ]
    loss.backward()
    for handle in handles:
        handle.remove()
    return fired


WORKLOADS = {
    "mlp": {"layers": 6, "layer_bytes": 4096},
    "transformer": {},
    "resnet50": {"width": 0.0625, "image": 32, "classes": 10},
    "densenet121": {"width": 0.25, "image": 32, "classes": 10},
    "nt3": {"mb": 1.0},
}


@pytest.mark.parametrize("name", WORKLOADS)
def test_the_order_is_known_before_the_first_backward(name: str) -> None:
    workload = workloads.by_name(name, **WORKLOADS[name])
    model = workload.model()
    parameters = list(model.parameters())
    x, y = workload.batch(0, 0, 1)
    output = model(x)
    predicted = ready_order(graph_roots(output), parameters)
    assert predicted == actual_order(parameters, workload.loss(output, y))
    assert sorted(predicted) == list(range(len(parameters)))


@pytest.mark.parametrize("reentrant", [None, False])
def test_a_shared_parameter_comes_after_its_last_use(reentrant: bool | None) -> None:
    model = models.seeded(lambda: models.Shared(reentrant))
    parameters = list(model.parameters())
    x, y = models.batch(0)
    output = model(x)
    predicted = ready_order(graph_roots(output), parameters)
    assert predicted == actual_order(parameters, models.loss_of(output, y))


def test_unused_parameters_are_left_out() -> None:
    model = models.seeded(models.Branches)
    model.use = ("right",)
    names = [n for n, _ in model.named_parameters()]
    order = ready_order(graph_roots(model(models.batch(0)[0])), list(model.parameters()))
    assert {names[i] for i in range(len(names))} - {names[i] for i in order} == {
        "left.weight",
        "left.bias",
    }


def test_roots_are_found_in_nested_outputs() -> None:
    x = torch.ones(2, requires_grad=True)
    output = {"a": [x * 2, (x * 3, None)], "b": "text", "c": x.detach()}
    assert len(graph_roots(output)) == 2


def test_an_lstm_is_predicted_up_to_ties() -> None:
    model = models.seeded(lambda: nn.LSTM(4, 4, num_layers=2))
    parameters = list(model.parameters())
    output, _ = model(torch.randn(3, 2, 4, generator=torch.Generator().manual_seed(0)))
    predicted = ready_order(graph_roots(output), parameters)
    actual = actual_order(parameters, output.sum())
    assert sorted(predicted) == sorted(actual)
    # Gradients of one fused node are ready at the same moment: only their neighbours may swap.
    assert all(abs(predicted.index(i) - actual.index(i)) <= 7 for i in actual)
