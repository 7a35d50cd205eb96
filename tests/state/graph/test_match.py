"""Prefixes against a walk over both graphs, and transfers that never pair the wrong tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from sapwood.errors import GraphError
from sapwood.state.graph import Graph, Kind, Layer, Source, find_graph, match_graphs
from sapwood.state.graph.builder import GraphBuilder, Origin, Owner, Slot
from sapwood.state.graph.ids import Hasher
from sapwood.state.graph.model import Config
from tests.state.graph import models


def walked(old: Graph, new: Graph) -> set[tuple[int, int]]:
    """The prefix as EvoStore walks it: a vertex counts once all its inputs do."""
    where: dict[object, list[int]] = {}
    for n, layer in enumerate(old.vertices):
        where.setdefault(_own(layer), []).append(n)
    pairs: dict[int, int] = {}
    for b, layer in enumerate(new.vertices):
        needs = [*layer.inputs, *([layer.of] if layer.of >= 0 else [])]
        needs += [tie.layer for tie in layer.ties]
        if any(n not in pairs for n in needs):
            continue
        inputs = [pairs[n] for n in layer.inputs]
        for a in where.get(_own(layer), []):
            other = old.vertices[a]
            same = list(other.inputs) == inputs
            ties = [(tie.local, pairs[tie.layer], tie.owned) for tie in layer.ties]
            tied = ties == [(tie.local, tie.layer, tie.owned) for tie in other.ties]
            if layer.kind is Kind.JOIN:
                same = sorted(other.inputs) == sorted(inputs)
            if (
                same
                and tied
                and (layer.of < 0 or pairs[layer.of] == other.of)
                and a not in pairs.values()
            ):
                pairs[b] = a
                break
    return {(a, b) for b, a in pairs.items()}


def _own(layer: Layer) -> object:
    name = layer.name if layer.named else None
    return layer.kind, layer.config, layer.ordinal, layer.siblings, name


@st.composite
def graphs(draw: st.DrawFn, seed: Any) -> Graph:
    """A random program over a few kinds of layers; two of one seed begin alike."""
    common, extra = seed, draw(st.lists(_STEP, max_size=6))
    cut = draw(st.integers(0, len(common)))
    steps = [*common[:cut], *extra]
    owners = [
        Owner(f"l{n}", Config(f"k{kind}", (), (("w", (kind + 1,)),)), (_slot(n, kind),))
        for n, (kind, *_) in enumerate(steps)
    ]
    builder = GraphBuilder(owners)
    values = [Origin(place="0")]
    for n, (kind, a, b, plain) in enumerate(steps):
        read = builder.union([values[a % len(values)], values[b % len(values)]])
        assert read is not None
        if plain:
            values.append(Origin((builder.plain(Config(f"p{kind}"), [read]),)))
        else:
            values.append(Origin((builder.owner(n, [read]),)))
    return builder.finish(Source.TRACED, "", Hasher())


def _slot(n: int, kind: int) -> Slot:
    return Slot("w", n, (kind + 1,), "float32", False, (f"l{n}.w",))


_STEP = st.tuples(st.integers(0, 2), st.integers(0, 9), st.integers(0, 9), st.booleans())


@settings(max_examples=300, deadline=None)
@given(st.data(), st.lists(_STEP, max_size=12))
def test_the_intersection_of_ids_is_the_prefix_a_walk_finds(
    data: st.DataObject, seed: list[Any]
) -> None:
    old, new = data.draw(graphs(seed)), data.draw(graphs(seed))
    found = {(old.by_id[v.id], n) for n, v in enumerate(new.vertices) if v.id in old.by_id}
    assert found == walked(old, new)
    match = match_graphs(old, new)
    assert set(match.vertices) <= found
    if not match.refused:
        assert set(match.vertices) == found


def pairs(old: nn.Module, new: nn.Module, sample: Any) -> tuple[dict[str, str], tuple[str, ...]]:
    match = match_graphs(find_graph(old, sample), find_graph(new, sample))
    assert all(p.old.shape == p.new.shape and p.same_dtype for p in match.tensors)
    return {p.new.names[0]: p.old.names[0] for p in match.tensors}, match.refused


@pytest.mark.parametrize("kind", models.ALL)
def test_a_model_matches_itself_by_name(kind: Any) -> None:
    found, refused = pairs(kind(), kind(), kind.sample())
    assert found == {n: n for n in found}
    assert not refused
    state = set(kind().state_dict()) - {"head.weight"}
    assert set(found) - {"head.weight"} == state


class Swapped(models.Attention):
    """The same layers, called in another order."""

    def forward(self, x: Tensor) -> Tensor:
        k, v, q = self.k(x), self.v(x), self.q(x)
        return self.out(nn.functional.scaled_dot_product_attention(q, k, v)) + x


def test_siblings_called_in_another_order_are_not_paired() -> None:
    found, refused = pairs(models.Attention(), Swapped(), models.Attention.sample())
    assert found == {}
    assert any("another order" in why for why in refused)
    assert any(why.startswith("out: depends") for why in refused)


class MoreSiblings(models.Attention):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * torch.sigmoid(self.gate(x))


class MoreSiblingsFirst(MoreSiblings):
    def forward(self, x: Tensor) -> Tensor:
        return torch.sigmoid(self.gate(x)) * models.Attention.forward(self, x)


@pytest.mark.parametrize("kind", [MoreSiblings, MoreSiblingsFirst])
def test_with_one_sibling_more_nobody_knows_who_is_who(kind: Any) -> None:
    found, _ = pairs(models.Attention(), kind(), models.Attention.sample())
    assert found == {}


def test_a_child_gets_the_layers_before_its_change() -> None:
    old, new = models.ResNet(), models.ResNet(classes=9)
    found, refused = pairs(old, new, models.ResNet.sample())
    assert set(new.state_dict()) - set(found) == {"fc.weight", "fc.bias"}
    assert not refused


def test_copied_tensors_give_the_same_activations() -> None:
    old, new = models.Mixture().eval(), models.Mixture().eval()
    found, _ = pairs(old, new, models.Mixture.sample())
    state = old.state_dict()
    new.load_state_dict({here: state[there] for here, there in found.items()})
    x = models.Mixture.sample()
    assert torch.equal(old(x), new(x))


def test_graphs_found_in_different_ways_are_not_compared() -> None:
    model, sample = models.ResNet(), models.ResNet.sample()
    with pytest.raises(GraphError, match="traced and the new one symbolic"):
        match_graphs(find_graph(model, sample), find_graph(model))


def test_dtypes_are_matched_apart() -> None:
    x = torch.randn(1, 4)
    old, new = nn.Linear(4, 4), nn.Linear(4, 4).double()
    match = match_graphs(find_graph(old, x), find_graph(new, x.double()))
    assert match.complete
    assert not any(p.same_dtype for p in match.tensors)


def test_experts_chosen_by_values_pair_by_name_whatever_the_batch() -> None:
    torch.manual_seed(0)
    model, other = models.Routed(), models.Routed()
    one, two = (torch.randn(1, 8) for _ in range(2))
    a, b = find_graph(model, one), find_graph(other, two)
    assert a.reads_values
    assert b.reads_values
    match = match_graphs(a, b)
    assert {p.old.names for p in match.tensors} >= {("router.weight",)}
    assert all(p.old.names == p.new.names for p in match.tensors)


class Branch(nn.Module):
    """Takes one of two equal layers, by value."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.low, self.high = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        return self.high(y) if x.sum() > 0 else self.low(y)


def test_branches_taken_by_value_are_not_confused() -> None:
    up, down = torch.ones(1, 4), -torch.ones(1, 4)
    a, b = find_graph(Branch(), up), find_graph(Branch(), down)
    assert a.source is b.source is Source.TRACED
    assert a.reads_values
    assert b.reads_values
    match = match_graphs(a, b)
    assert [p.new.names for p in match.tensors] == [("first.bias",), ("first.weight",)]


class Towers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.user = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
        self.item = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))

    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        return self.user(user) * self.item(item)


class TowersItemFirst(Towers):
    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        return self.item(item) * self.user(user)


class TowersOtherArguments(Towers):
    def forward(self, item: Tensor, user: Tensor) -> Tensor:
        return super().forward(user, item)


def test_towers_are_told_apart_by_their_inputs() -> None:
    sample = torch.ones(1, 4), torch.ones(1, 4)
    found, refused = pairs(Towers(), TowersItemFirst(), sample)
    assert len(found) == 8
    assert found == {n: n for n in found}
    assert not refused
    found, refused = pairs(Towers(), TowersOtherArguments(), sample)
    assert found == {}
    assert any("names and inputs disagree" in why for why in refused)


def test_renumbered_layers_still_match() -> None:
    old = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    new = nn.Sequential(nn.Sequential(), *(nn.Linear(4, 4) for _ in range(3)))
    found, refused = pairs(old, new, torch.ones(1, 4))
    assert found == {f"{n + 1}.{t}": f"{n}.{t}" for n in range(3) for t in ("weight", "bias")}
    assert not refused


def test_a_walk_over_real_models_agrees() -> None:
    made = [(kind(), kind.sample()) for kind in models.ALL]
    made += [
        (models.ResNet(7), models.ResNet.sample()),
        (models.Encoder(3), models.Encoder.sample()),
        (models.Mixture(4), models.Mixture.sample()),
        (models.TiedHead(tied=False), models.TiedHead.sample()),
        (models.DenseNet(20), models.DenseNet.sample()),
    ]
    graphs_ = [find_graph(model, sample) for model, sample in made]
    for old in graphs_:
        for new in graphs_:
            found = {(old.by_id[v.id], n) for n, v in enumerate(new.vertices) if v.id in old.by_id}
            assert found == walked(old, new)
