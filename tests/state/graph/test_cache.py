"""The cache: nothing is done twice, and nothing stale ever comes out."""

from __future__ import annotations

import dataclasses
import gc
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune

from sapwood.state.graph import GraphCache, find_graph
from tests.state.graph import models


class Options:
    """What a configuration object of a model is like."""

    def __init__(self) -> None:
        self.skip, self.inner = True, {"scale": 1}


@dataclasses.dataclass(slots=True)
class Slotted:
    skip: bool = False


class Net(nn.Module):
    switch = True

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.norm, self.act, self.drop = nn.BatchNorm1d(4), nn.ReLU(), nn.Dropout(0.1)
        self.more = nn.ModuleList([nn.Linear(4, 4)])
        self.options, self.order, self.flag = Options(), ["a", "b"], False
        self.slotted, self.array = Slotted(), np.zeros(2)
        self.register_buffer("table", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        for name in self.order:
            x = getattr(self, name)(x)
        if self.flag or not self.switch or self.slotted.skip or self.array[0]:
            x = self.c(x)
        if self.options.skip and self.options.inner["scale"]:
            x = x + self.drop(self.act(self.norm(x)))
        for layer in self.more:
            x = layer(x)
        return x + self.table

    @staticmethod
    def sample(batch: int = 2) -> Any:
        return torch.randn(batch, 4)


def other(self: Net, x: Tensor) -> Tensor:
    return self.c(x)


def tie(m: Net) -> None:
    m.b.weight = m.a.weight


def exchange(m: Net) -> None:
    m.a, m.act = m.act, m.a


def rename(m: Net) -> None:
    m._modules["z"] = m._modules.pop("c")


def move_parameter(m: Net) -> None:
    m.register_parameter("w", m.act._parameters.get("w", nn.Parameter(torch.zeros(2))))


def rebind(m: Net) -> None:
    m.a.__dict__ = {**m.a.__dict__, "_parameters": {"weight": nn.Parameter(torch.zeros(4, 4))}}


def data(m: Net, value: Tensor) -> None:
    m.table.data = value


CHANGES: dict[str, Callable[[Net], Any]] = {
    "layer replaced": lambda m: setattr(m, "act", nn.GELU()),
    "layer replaced by one of another shape": lambda m: m.more.__setitem__(0, nn.Linear(4, 6)),
    "parameter exchanged": lambda m: (
        setattr(m.more[0], "weight", nn.Parameter(torch.ones(9, 4)))
        or setattr(m.more[0], "bias", None)
    ),
    "data exchanged": lambda m: data(m, torch.zeros(1)),
    "resized in place": lambda m: m.table.resize_(1),
    "dtype": lambda m: m.table.data.double() is None or setattr(m.table, "data", m.table.double()),
    "module added": lambda m: m.more.append(nn.Linear(4, 4)),
    "unused module added": lambda m: m.add_module("spare", nn.Linear(2, 2)),
    "module removed": lambda m: delattr(m, "c"),
    "module renamed": rename,
    "modules exchanged": exchange,
    "tied": tie,
    "bias removed": lambda m: setattr(m.c, "bias", None),
    "parameter added": move_parameter,
    "dictionary exchanged": rebind,
    "setting of a layer": lambda m: setattr(m.norm, "eps", 0.1),
    "rate": lambda m: setattr(m.drop, "p", 0.7),
    "flag of a model": lambda m: setattr(m, "flag", True),
    "list changed in place": lambda m: m.order.append("c"),
    "list reordered": lambda m: m.order.reverse(),
    "option object": lambda m: setattr(m.options, "skip", False),
    "option object with slots": lambda m: setattr(m.slotted, "skip", True),
    "array": lambda m: m.array.fill(1),
    "deep in an option object": lambda m: m.options.inner.update(scale=0),
    "forward of the object": lambda m: setattr(m, "forward", other.__get__(m)),
    "forward of a layer": lambda m: setattr(m.act, "forward", lambda x: x + m.c(x)),
    "class": lambda m: setattr(m.act, "__class__", nn.Tanh),
    "buffer no longer persistent": lambda m: m._non_persistent_buffers_set.add("table"),
    "parametrized": lambda m: parametrizations.weight_norm(m.a),
    "pruned": lambda m: prune.l1_unstructured(m.a, "weight", 2),
    "container replaced by an empty one": lambda m: setattr(m, "more", nn.ModuleList()),
    "child set to none": lambda m: m._modules.update(c=None),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
@pytest.mark.filterwarnings("ignore")
def test_a_change_is_never_missed(change: Callable[[Net], Any]) -> None:
    cache, model, x = GraphCache(), Net(), Net.sample()
    before = cache.find(model, x)
    assert cache.find(model, x) is before
    change(model)
    found = cache.find(model, x)
    assert found == find_graph(model, x)
    assert found is not before
    assert found != before
    assert cache.find(model, x) is found


def test_a_change_of_a_class_is_not_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    cache, model, x = GraphCache(), Net(), Net.sample()
    before = cache.find(model, x)
    monkeypatch.setattr(Net, "switch", False)
    switched = cache.find(model, x)
    assert switched == find_graph(model, x) != before
    monkeypatch.setattr(Net, "forward", other)
    assert cache.find(model, x) == find_graph(model, x) != switched


def test_what_does_not_matter_does_not_miss() -> None:
    cache, model, x = GraphCache(), Net(), Net.sample()
    before = cache.find(model, x)
    count = cache.hasher.computed
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        model.train()
        model(x).sum().backward()
        optimizer.step()
        model.eval()
        assert cache.find(model, torch.randn(2, 4)) is before
        assert before.encoded is cache.find(model, x).encoded
    model.requires_grad_(False)
    model.load_state_dict(Net().state_dict())
    assert cache.find(model, x) is before
    assert (cache.hits, cache.misses, cache.hasher.computed) == (5, 1, count)


def test_other_samples_are_other_keys() -> None:
    cache, model = GraphCache(), models.Encoder()
    tokens = models.Encoder.sample()
    mask = torch.zeros(2, 5, dtype=torch.bool)
    for sample in (tokens, (tokens, mask), {"tokens": tokens, "mask": mask}, None):
        cache.find(model, sample)
        misses = cache.misses
        cache.find(model, sample)
        assert cache.misses == misses
    assert cache.misses == 4


def test_a_graph_that_follows_from_values_is_found_each_time() -> None:
    cache, model = GraphCache(), models.Routed()
    torch.manual_seed(0)
    for _ in range(3):
        x = torch.randn(1, 8)
        assert cache.find(model, x) == find_graph(model, x)
    assert cache.hits == 0


def test_models_are_let_go() -> None:
    cache, model = GraphCache(), Net()
    cache.find(model, Net.sample())
    gone = weakref.ref(model), weakref.ref(model.a), weakref.ref(model.a.weight)
    del model
    gc.collect()
    assert [one() for one in gone] == [None] * 3
    assert not cache._models


def test_many_models_do_not_fill_it() -> None:
    cache = GraphCache()
    kept = [nn.Linear(2, 2) for _ in range(20)]
    for model in kept:
        cache.find(model, torch.randn(1, 2))
    assert len(cache._models) <= 8
    assert cache.hasher.computed <= 6  # they are one architecture


def test_decoded_graphs_are_kept() -> None:
    cache = GraphCache()
    parts = cache.find(Net(), Net.sample()).encoded
    count = cache.hasher.computed
    first = cache.decode(parts.topology, parts.configs, parts.labels)
    assert cache.decode(parts.topology, parts.configs, parts.labels) is first
    assert cache.hasher.computed == count


def test_a_tensor_that_steers_is_never_stale() -> None:
    class Steered(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.on = nn.Linear(2, 2), nn.Linear(2, 2), torch.zeros(1)

        def forward(self, x: Tensor) -> Tensor:
            return self.b(self.a(x)) if self.on.item() else self.a(x)

    cache, model, x = GraphCache(), Steered(), torch.ones(1, 2)
    before = cache.find(model, x)
    assert before.reads_values
    model.on.data.fill_(1)
    assert cache.find(model, x) == find_graph(model, x) != before


def test_threads_see_the_model_and_never_its_stand_ins() -> None:
    model, x = models.Mixture(), models.Mixture.sample()
    want = find_graph(model, x)
    caches = [GraphCache() for _ in range(2)]
    with ThreadPoolExecutor(8) as pool:
        found = list(
            pool.map(
                lambda n: find_graph(model, x) if n % 2 else _ask(caches, n, model, x), range(24)
            )
        )
    assert all(one == want for one in found)
    assert all(one.reason == "" for one in found)


def _ask(caches: list[GraphCache], n: int, model: nn.Module, x: Tensor) -> Any:
    return caches[n // 2 % 2].find(model, x)
