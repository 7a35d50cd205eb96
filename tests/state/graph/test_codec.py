"""The encoding: small, exact, and safe to decode from anywhere."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn

from sapwood.errors import GraphError
from sapwood.state.graph import Config, Graph, Source, decode_graph, encode_graph, find_graph
from sapwood.state.graph.packing import PackReader, pack_config, unpack_config, varint
from tests.state.graph import models

ROOT = Path(__file__).parents[3]
KINDS = [*models.ALL, models.Routed]


def found(kind: Any) -> Graph:
    return find_graph(kind(), kind.sample())


@pytest.mark.parametrize("kind", KINDS)
def test_a_graph_comes_back_as_it_was(kind: Any) -> None:
    graph = found(kind)
    parts = graph.encoded
    assert parts == encode_graph(graph)
    again = decode_graph(parts.topology, parts.configs, parts.labels)
    assert again == graph
    assert len(set(parts.configs)) == len(parts.configs)
    if any(v.named for v in graph.vertices):
        with pytest.raises(GraphError, match="without labels"):
            decode_graph(parts.topology, parts.configs)
    else:
        bare = decode_graph(parts.topology, parts.configs)
        assert bare.ids == graph.ids
        assert [t.shape for v in bare.vertices for t in v.tensors] == [
            t.shape for v in graph.vertices for t in v.tensors
        ]


@pytest.mark.parametrize(
    ("model", "sample"),
    [
        (nn.Sequential(*(nn.Linear(2, 2) for _ in range(200))), torch.randn(1, 2)),
        (models.Encoder(12), models.Encoder.sample()),
        (models.Mixture(), models.Mixture.sample()),
        (models.DenseNet(100), models.DenseNet.sample()),
        (models.ResNet(), models.ResNet.sample()),
    ],
)
def test_at_most_eight_bytes_a_layer(model: nn.Module, sample: Any) -> None:
    graph = find_graph(model, sample)
    assert len(graph.encoded.topology) <= 8 * sum(1 for _ in graph.layers)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("part", ["topology", "labels", "configs"])
def test_every_flipped_bit_and_every_cut_is_found(kind: Any, part: str) -> None:
    parts = found(kind).encoded
    given = {"topology": parts.topology, "configs": parts.configs, "labels": parts.labels}
    whole = b"".join(parts.configs) if part == "configs" else getattr(parts, part)
    for n in range(0, len(whole), max(1, len(whole) // 60)):
        flipped = bytearray(whole)
        flipped[n] ^= 1 << n % 8
        for bad in (bytes(flipped), whole[:n]):
            change: Any = bad if part != "configs" else _split(bad, parts.configs)
            with pytest.raises(GraphError):
                decode_graph(**{**given, part: change})


def _split(data: bytes, like: tuple[bytes, ...]) -> list[bytes]:
    out, at = [], 0
    for one in like:
        out.append(data[at : at + len(one)])
        at += len(one)
    return out


def test_parts_of_different_models_do_not_go_together() -> None:
    one, two = found(models.ResNet).encoded, found(models.UNet).encoded
    for configs in (two.configs, one.configs[:-1], one.configs[::-1], ()):
        with pytest.raises(GraphError):
            decode_graph(one.topology, configs, one.labels)
    with pytest.raises(GraphError):
        decode_graph(one.topology, one.configs, two.labels)


GRAPH = find_graph(models.TiedHead(), models.TiedHead.sample())
HEAD = GRAPH.encoded.topology[:21]


@settings(max_examples=400, deadline=None)
@given(st.binary(max_size=300))
@example(b"\xff" * 40)
@example(varint(2**62) + b"\x03\x00")
def test_no_bytes_break_the_decoder(data: bytes) -> None:
    for topology in (data, HEAD + data, HEAD + varint(3) + data):
        with pytest.raises(GraphError):
            decode_graph(topology, GRAPH.encoded.configs, GRAPH.encoded.labels)
    with pytest.raises(GraphError):
        decode_graph(GRAPH.encoded.topology, GRAPH.encoded.configs, data)
    with contextlib.suppress(GraphError):
        assert pack_config(unpack_config(data)) == data


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_no_change_of_a_good_topology_breaks_the_decoder(data: st.DataObject) -> None:
    good = bytearray(found_once(data.draw(st.sampled_from(["m", "t"]))))
    for _ in range(data.draw(st.integers(1, 5))):
        at = data.draw(st.integers(0, len(good) - 1))
        good[at : at + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=4))
        if not good:
            return
    configs = _GOOD[0].encoded.configs + _GOOD[1].encoded.configs
    with contextlib.suppress(GraphError):
        decode_graph(bytes(good), configs[: data.draw(st.integers(0, len(configs)))])


_GOOD = [found(models.Mixture), GRAPH]


def found_once(which: str) -> bytes:
    return _GOOD[which == "t"].encoded.topology


def test_few_bytes_cannot_ask_for_much_memory() -> None:
    long = pack_config(Config("k", (), tuple((f"{n:06}", (1,)) for n in range(20_000))))
    many = HEAD + varint(100_000) + b"\x03\x00" * 100_000
    with pytest.raises(GraphError, match="tensors and settings"):
        decode_graph(many, [long])
    with pytest.raises(GraphError, match="number of vertices"):
        decode_graph(HEAD + varint(2**60), [long])


@given(st.integers(0, 2**63 - 1))
def test_numbers_come_back(value: int) -> None:
    reader = PackReader(varint(value), "a number")
    assert reader.number() == value
    assert not reader.left


def test_the_reading_side_needs_no_torch() -> None:
    code = (
        "import sys, sapwood.state.graph as g; from sapwood.state.graph import decode_graph, "
        "match_graphs; assert 'torch' not in sys.modules and 'numpy' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, cwd=ROOT)


def test_an_approximate_graph_comes_back_too() -> None:
    graph = find_graph(models.ResNet(), allow=[Source.TREE])
    parts = graph.encoded
    assert decode_graph(parts.topology, parts.configs, parts.labels) == graph
