"""Ids: equal for equal architectures wherever and however they are built, and only for those."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from sapwood.state.graph import Graph, GraphCache, Kind, Source, find_graph
from sapwood.testing import ranks
from tests.state.graph import models

_PRINT = """
import json, sys, torch
from sapwood.state.graph import find_graph
from tests.state.graph import models
torch.manual_seed(int(sys.argv[1]))
out = {}
for kind in reversed(models.ALL):
    out[kind.__name__] = [i.hex() for i in find_graph(kind(), kind.sample()).ids]
print(json.dumps(out))
"""


def graph(model: nn.Module, sample: Any) -> Graph:
    found = find_graph(model, sample)
    assert found.source is Source.TRACED, found.reason
    return found


def ids_of(kind: Any, model: nn.Module | None = None, batch: int = 2) -> tuple[bytes, ...]:
    return graph(model or kind(), kind.sample(batch)).ids


@pytest.mark.parametrize("kind", models.ALL)
def test_ids_follow_from_the_architecture_alone(kind: Any) -> None:
    model = kind()
    want = ids_of(kind, model)
    assert len(set(want)) == len(want)
    assert ids_of(kind, batch=3) == want
    assert ids_of(kind, kind().train()) == want == ids_of(kind, kind().eval())
    assert ids_of(kind, kind().requires_grad_(False)) == want
    assert ids_of(kind, copy.deepcopy(model)) == want
    with torch.device("meta"):
        assert ids_of(kind, kind()) == want
    names = {n for n, _ in model.named_parameters(remove_duplicate=False)}
    assert names <= set(graph(model, kind.sample()).tensors)


@pytest.mark.parametrize("kind", models.ALL)
def test_real_tensors_give_the_ids_of_the_meta_device(kind: Any) -> None:
    from sapwood.state.graph.ids import Hasher
    from sapwood.state.graph.sample import as_sample
    from sapwood.state.graph.traced import trace_graph

    sample = as_sample(kind.sample())
    on_meta, real = (trace_graph(kind(), sample, Hasher(), meta=meta) for meta in (True, False))
    assert on_meta.ids == real.ids
    assert not real.reads_values


def test_dtype_is_not_in_an_id() -> None:
    want = graph(models.ResNet(), models.ResNet.sample())
    half = graph(models.ResNet().bfloat16(), models.ResNet.sample().bfloat16())
    assert half.ids == want.ids
    assert half.tensors["fc.weight"][1].dtype == "bfloat16"


def test_two_processes_agree() -> None:
    found = []
    for seed in ("1", "2"):
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", _PRINT, seed],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            timeout=100,
            check=True,
            cwd=Path(__file__).parents[3],
        )
        found.append(json.loads(done.stdout))
    assert found[0] == found[1]
    assert found[0]["ResNet"] == [i.hex() for i in ids_of(models.ResNet)]


class Renamed(nn.Module):
    """``Attention``, with other names, registered the other way round."""

    def __init__(self) -> None:
        super().__init__()
        self.zz = nn.Linear(8, 8)
        self.alpha = nn.ModuleDict({"vs": nn.Linear(8, 8), "ks": nn.Linear(8, 8)})
        self.queries = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.queries(x), self.alpha["ks"](x), self.alpha["vs"](x)
        return x + self.zz(nn.functional.scaled_dot_product_attention(q, k, v))


def test_names_and_order_of_construction_do_not_matter() -> None:
    want = graph(models.Attention(), models.Attention.sample())
    assert ids_of(models.Attention, models.Attention("vkq")) == want.ids
    other = graph(Renamed(), models.Attention.sample())
    assert other.ids == want.ids
    by_id = {layer.id: layer.name for layer in other.layers}
    assert [by_id[layer.id] for layer in want.layers] == [
        "queries", "alpha.ks", "alpha.vs", "zz"
    ]  # fmt: skip


def test_fused_and_written_out_attention_are_one() -> None:
    """Devices differ in what a fused operation becomes."""
    fused, written = (models.Attention(fused=f) for f in (True, False))
    assert ids_of(models.Attention, fused) == ids_of(models.Attention, written)


def test_wrappers_do_not_show() -> None:
    model = models.ResNet()
    want = graph(model, models.ResNet.sample())
    compiled = torch.compile(model, backend="eager")
    assert graph(compiled, models.ResNet.sample()) == want  # names, too
    model.blocks[1] = torch.compile(model.blocks[1], backend="eager")
    assert graph(model, models.ResNet.sample()) == want
    model.compile(backend="eager")
    assert graph(model, models.ResNet.sample()) == want


def wrapped_models() -> None:
    model, sample = models.TiedHead(), models.TiedHead.sample()
    want = graph(model, sample)
    wrapped = nn.parallel.DistributedDataParallel(torch.compile(model, backend="eager"))
    assert graph(wrapped, sample) == want
    cache = GraphCache()
    assert cache.find(wrapped, sample) is cache.find(model, sample)
    sharded, sample = models.Mixture(), models.Mixture.sample()
    want = graph(sharded, sample)
    mesh = init_device_mesh("cpu", (1,))
    for expert in sharded.experts:
        fully_shard(expert.up, mesh=mesh)
    fully_shard(sharded, mesh=mesh)
    assert graph(sharded, sample) == want


def test_distributed_wrappers_do_not_show() -> None:
    ranks.spawn(wrapped_models, 1, timeout=100, init=True)


@pytest.mark.parametrize(
    "change",
    [
        lambda m: setattr(m.blocks[0].conv1, "stride", (2, 2)),
        lambda m: setattr(m.stem[1], "eps", 1e-3),
        lambda m: m.stem.__setitem__(2, nn.GELU()),
        lambda m: setattr(m, "fc", nn.Linear(16, 6)),
        lambda m: setattr(m, "fc", nn.Linear(16, 5, bias=False)),
    ],
)
def test_what_shapes_a_layer_is_in_its_id(change: Any) -> None:
    model = models.ResNet()
    before = set(graph(model, models.ResNet.sample()).ids)
    change(model)
    try:
        after = set(graph(model, models.ResNet.sample()).ids)
    except AssertionError:  # a stride that does not fit the residual: no trace of it
        return
    assert before - after


def test_a_change_reaches_all_that_depends_on_it_and_nothing_else() -> None:
    one, two = models.ResNet(), models.ResNet()
    two.blocks[2].conv2 = nn.Conv2d(16, 16, 5, 1, 2, bias=False)
    first, second = (graph(m, models.ResNet.sample()) for m in (one, two))
    same = set(first.ids) & set(second.ids)
    names = {layer.name for layer in first.layers if layer.id in same and layer.tensors}
    assert {n for n in names if n.startswith(("stem", "blocks.0", "blocks.1"))} == {
        "stem.0", "stem.1", "blocks.0.conv1", "blocks.0.bn1", "blocks.0.conv2", "blocks.0.bn2",
        "blocks.1.conv1", "blocks.1.bn1", "blocks.1.conv2", "blocks.1.bn2",
    }  # fmt: skip
    assert names & {"blocks.2.conv1", "blocks.2.down.0"}
    assert "fc" not in names
    assert "blocks.2.conv2" not in names
    assert "blocks.3.conv1" not in names


def test_siblings_have_ordinals_in_forward_order_and_know_how_many_they_are() -> None:
    layers = {
        layer.name: layer for layer in graph(models.Mixture(), models.Mixture.sample()).layers
    }
    ups = [layers[f"experts.{n}.up"] for n in range(8)]
    assert [up.ordinal for up in ups] == list(range(8))
    assert {up.siblings for up in ups} == {8}
    nine = graph(models.Mixture(9), models.Mixture.sample())
    assert not {up.id for up in ups} & set(nine.ids)  # nobody knows which one is new


def test_tied_weights_are_one_tensor_with_two_names() -> None:
    found = graph(models.TiedHead(), models.TiedHead.sample())
    at, tensor = found.tensors["head.weight"]
    assert found.tensors["embed.weight"] == (at, tensor)
    assert tensor.names == ("embed.weight", "head.weight")
    head = next(layer for layer in found.layers if layer.name == "head")
    assert head.tensors == ()
    assert [(t.local, t.layer) for t in head.ties] == [("weight", at)]
    untied = graph(models.TiedHead(tied=False), models.TiedHead.sample())
    assert head.id not in untied.ids
    assert found.ids[:2] == untied.ids[:2]


def test_unused_parameters_are_isolated_layers() -> None:
    found = graph(models.Unused(), models.Unused.sample())
    unused = {layer.name: layer for layer in found.layers if layer.kind is Kind.UNUSED}
    assert set(unused) == {"", "spare", "twin1", "twin2"}
    assert not any(layer.inputs for layer in unused.values())
    assert [n for n, layer in unused.items() if layer.named] == ["twin1", "twin2"]


def test_recurrence_does_not_show_the_length_of_the_sample() -> None:
    model = models.CellLoop()
    short, long = (graph(model, models.CellLoop.sample(2, n)) for n in (1, 9))
    assert short == long


def test_edges_are_linear() -> None:
    for few, many in ((models.Encoder(4), models.Encoder(16)),):
        a, b = (graph(m, models.Encoder.sample()) for m in (few, many))
        assert b.edges <= 4 * a.edges
    assert graph(models.DenseNet(60), models.DenseNet.sample()).edges < 60 * 4


def test_a_layer_without_tensors_counts() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Dropout(), nn.Identity(), nn.Linear(2, 2))
    found = graph(model, torch.randn(1, 2))
    kinds = [layer.config.kind for layer in found.layers if layer.config is not None]
    assert kinds == [f"torch.nn.{k}" for k in ("Linear", "ReLU", "Dropout", "Identity", "Linear")]
    model[1] = nn.Tanh()
    assert graph(model, torch.randn(1, 2)).ids[2:] != found.ids[2:]


class Functional(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.a, self.b, self.function = nn.Linear(3, 3), nn.Linear(3, 3), function

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.function(self.a(x)))


def test_functional_activations_are_layers() -> None:
    x = torch.randn(1, 3)
    relu, other, gelu = (
        graph(Functional(f), x).ids
        for f in (torch.relu, lambda t: t.clone().relu_(), nn.functional.gelu)
    )
    assert relu == other != gelu
    assert relu[0] == gelu[0]
    assert relu[-1] != gelu[-1]


class Reused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.a(self.b(self.a(x)))


def test_a_layer_used_again_is_one_layer() -> None:
    found = graph(Reused(), torch.randn(1, 3))
    assert [v.kind for v in found.vertices] == [Kind.INPUT, Kind.OWNER, Kind.OWNER, Kind.AGAIN]
    assert found.vertices[3].of == 1
    assert len(found.ids) == 2


def test_sources_never_share_an_id() -> None:
    model, sample = models.ResNet(), models.ResNet.sample()
    program = torch.export.export(models.ResNet().eval(), (sample,))
    graphs = [find_graph(model, sample, exported=program, allow=[source]) for source in Source]
    assert [g.source for g in graphs] == list(Source)
    ids = [i for g in graphs for i in g.ids]
    assert len(set(ids)) == len(ids)
    assert graphs[3].approximate
    assert "traced: not allowed" in graphs[3].reason
    # All but the tree find the same layers and edges.
    flows = [[(v.kind, v.config, v.inputs) for v in g.vertices] for g in graphs[:3]]
    assert flows[0] == flows[1] == flows[2]


def test_a_hasher_hashes_a_known_layer_once() -> None:
    cache = GraphCache()
    cache.find(models.ResNet(), models.ResNet.sample())
    count = cache.hasher.computed
    cache.find(models.ResNet(), models.ResNet.sample())
    assert cache.hasher.computed == count
    cache.find(models.ResNet(classes=7), models.ResNet.sample())
    assert cache.hasher.computed == count + 2  # a configuration and a layer
