"""Values taken apart into tensors and structure, and put together again."""

from collections import OrderedDict
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from sapwood.errors import Damaged, StoreError
from sapwood.store.tree import put_together, take_apart


def back(value: Any) -> Any:
    parts = take_apart(value)
    return put_together(parts.structure, lambda n: parts.tensors[n].clone())


def test_a_state_dict_keeps_names_order_and_versions() -> None:
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Linear(2, 2))
    state = model.state_dict()
    found = back(model)
    assert list(found) == list(state)
    assert all(torch.equal(found[k], state[k]) for k in state)
    assert type(found) is OrderedDict
    assert {k: dict(v) for k, v in found._metadata.items()} == {
        k: dict(v) for k, v in state._metadata.items()
    }
    model.load_state_dict(found)


def test_names_of_a_module_are_those_of_its_state_dict() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    assert [name for name, _ in take_apart(model).names] == list(model.state_dict())


def test_nested_values_come_back_with_their_types() -> None:
    value = {
        "model": {"w": torch.arange(4.0)},
        "optimizer": {"state": {0: {"m": torch.ones(2), "step": torch.tensor(3)}}, "lr": 0.1},
        "history": [1, 2.5, None, "x", (torch.zeros(1), np.float32(2))],
        "array": np.arange(5, dtype=">i2"),
        7: b"bytes",
    }
    found = back(value)
    assert torch.equal(found["optimizer"]["state"][0]["m"], torch.ones(2))
    assert type(found["history"][4]) is tuple
    assert found["array"].dtype == np.dtype(">i2")
    assert found[7] == b"bytes"
    names = [name for name, _ in take_apart(value).names]
    assert names == [
        "model.w",
        "optimizer.state.0.m",
        "optimizer.state.0.step",
        "history.4.0",
    ]


def test_tied_tensors_are_one_with_two_names_and_stay_tied() -> None:
    shared = torch.arange(6.0).reshape(2, 3)
    value = {"a": shared, "b": shared.view(2, 3), "c": shared.t(), "d": shared[0]}
    parts = take_apart(value)
    assert dict(parts.names)["a"] == dict(parts.names)["b"]
    assert len(parts.tensors) == 3
    found = back(value)
    assert found["a"] is found["b"]
    assert torch.equal(found["c"], shared.t())


def test_views_that_are_only_as_large_are_other_tensors() -> None:
    base = torch.arange(4.0)
    found = back({"a": base, "i": base.view(torch.int32), "n": torch._neg_view(base)})
    assert torch.equal(found["n"], -base)
    assert found["i"].dtype == torch.int32


def test_keys_that_make_one_name_do_not_share_a_tensor() -> None:
    value = {"a.b": torch.zeros(1), "a": {"b": torch.ones(1)}, 1: torch.ones(2), "1": torch.ones(3)}
    parts = take_apart(value)
    assert len(dict(parts.names)) == 4
    found = back(value)
    assert found["a.b"].item() == 0
    assert found["a"]["b"].item() == 1
    assert found[1].shape == (2,)
    assert found["1"].shape == (3,)


def test_empty_tensors_are_apart() -> None:
    a, b = torch.empty(0, 3), torch.empty(2, 0)
    found = back({"a": a, "b": b})
    assert found["a"].shape == (0, 3)
    assert found["b"].shape == (2, 0)


def test_parameters_are_parameters_again() -> None:
    found = back([nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2), requires_grad=False)])
    assert [type(p) for p in found] == [nn.Parameter, nn.Parameter]
    assert [p.requires_grad for p in found] == [True, False]


@pytest.mark.parametrize(
    "value",
    [
        object(),
        {"f": lambda: 0},
        {"t": torch.ones(2, device="meta")},
        {"s": torch.ones(2).to_sparse()},
        {"bad\nname": torch.ones(1)},
    ],
)
def test_what_would_not_come_back_is_refused_by_name(value: Any) -> None:
    with pytest.raises(StoreError):
        take_apart(value)


def test_prefixes_of_wrappers_are_no_part_of_names() -> None:
    class Compiled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self._orig_mod = nn.Linear(2, 2)

    names = [name for name, _ in take_apart(nn.Sequential(Compiled())).names]
    assert names == ["0.weight", "0.bias"]


@pytest.mark.parametrize("structure", [{"$": "kept", "v": {}}, {"$": "kept", "v": 3}, {"$": "no"}])
def test_a_damaged_structure_is_named(structure: Any) -> None:
    with pytest.raises(Damaged):
        put_together(structure, lambda _: torch.ones(1))
