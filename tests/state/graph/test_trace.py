"""Random programs: what a trace sees is what the program does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from sapwood.state.graph import Graph, Kind, Source, find_graph
from sapwood.state.graph.builder import GraphBuilder, Origin
from sapwood.state.graph.configure import describe_module, find_owners
from sapwood.state.graph.ids import Hasher
from sapwood.state.graph.sample import as_sample
from sapwood.state.graph.traced import trace_graph
from tests.state.graph import models

COMBINE: list[Any] = [
    lambda a, b: a + b,
    lambda a, b: a * torch.sigmoid(torch.zeros_like(b)) - b.view(-1, 4).clone().view(a.shape),
    lambda a, b: torch.cat([a, b], -1).chunk(2, -1)[0] + b,
    lambda a, b: torch.stack([a, b]).sum(0),
    lambda a, b: torch.where(torch.ones_like(a) > 0, a, b),
    lambda a, b: a.clone().add_(b),
    lambda a, b: torch.zeros_like(a).copy_(a).index_add_(0, torch.tensor([0]).to(a.device), b[:1]),
    lambda a, b: (a.transpose(0, 1) @ b @ torch.ones(4, 2, device=a.device)).transpose(0, 1),
]  # fmt: skip
PLAIN: list[Any] = [
    nn.ReLU,
    nn.Dropout,
    nn.Identity,
    lambda: nn.ReLU(inplace=True),
    lambda: nn.Softmax(-1),
]


class Program(nn.Module):
    """Every step combines two earlier values and gives them to a layer, new or used before."""

    def __init__(self, steps: list[Any]) -> None:
        super().__init__()
        self.steps = steps
        self.layers = nn.ModuleList(
            nn.Linear(4, 4) if kind < 5 else PLAIN[kind - 5]() for kind, *_ in steps
        )

    def forward(self, x: Tensor) -> Tensor:
        values = [x]
        for n, (_, a, b, how, again) in enumerate(self.steps):
            read = COMBINE[how](values[a % len(values)], values[b % len(values)])
            values.append(self.layers[self.layer(n, again)](read))
        return values[-1]

    def layer(self, n: int, again: int) -> int:
        return again % (n + 1) if again else n

    def expected(self) -> Graph:
        owners, index = find_owners(self)
        builder = GraphBuilder(owners)
        values = [Origin(place="0")]
        for n, (_, a, b, _, again) in enumerate(self.steps):
            read = builder.union([values[a % len(values)], values[b % len(values)]])
            assert read is not None
            module = self.layers[self.layer(n, again)]
            owner = index.get(id(module))
            if owner is None:
                vertex = builder.plain(describe_module(module), [read])
            else:
                vertex = builder.owner(owner, [read])
            values.append(Origin((vertex,)))
        return builder.finish(Source.TRACED, "", Hasher())


STEP = st.tuples(
    st.integers(0, 9), st.integers(0, 9), st.integers(0, 9), st.integers(0, 7), st.integers(0, 3)
)


@settings(max_examples=60, deadline=None)
@given(st.lists(STEP, min_size=1, max_size=10), st.booleans())
def test_a_trace_sees_what_a_program_does(steps: list[Any], meta: bool) -> None:
    model = Program(steps)
    found = trace_graph(model, as_sample(torch.randn(2, 4)), Hasher(), meta=meta)
    want = model.expected()
    assert [(v.kind, v.inputs, v.id) for v in found.vertices] == [
        (v.kind, v.inputs, v.id) for v in want.vertices
    ]
    assert not found.reads_values


@pytest.mark.parametrize(
    "kind", [models.Encoder, models.TiedHead, models.Mixture, models.UNet, models.Unused]
)
def test_an_exported_program_has_the_layers_and_edges_of_a_trace(kind: Any) -> None:
    model, sample = kind().eval(), kind.sample()
    program = torch.export.export(model, (sample,))
    exported = find_graph(model, exported=program, allow=[Source.EXPORTED])
    traced = find_graph(model, sample)
    flows = [[(v.kind, v.config, v.inputs) for v in g.vertices] for g in (exported, traced)]
    assert flows[0] == flows[1]


@pytest.mark.parametrize("kind", models.ALL)
@pytest.mark.parametrize("source", [Source.SYMBOLIC, Source.TREE])
def test_no_tensor_is_lost_by_the_other_ways(kind: Any, source: Source) -> None:
    model = kind()
    allow = [source, Source.TREE]
    found = find_graph(model, allow=allow)
    assert set(found.tensors) == set(model.state_dict())
    assert find_graph(kind(), allow=allow).ids == found.ids
    assert all(v.named for v in found.vertices if v.kind is Kind.OWNER) == found.approximate
