"""The architecture graph of a model: its layers, how they feed each other, and their stable ids.

What finds a graph needs torch, and is loaded when used; the rest starts without it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from sapwood.state.graph.codec import EncodedGraph, decode_graph, encode_graph
from sapwood.state.graph.ids import ID_BYTES, Hasher
from sapwood.state.graph.match import Match, TensorPair, match_graphs
from sapwood.state.graph.model import Config, Graph, Kind, Layer, LayerTensor, Source, Tie

if TYPE_CHECKING:
    from sapwood.state.graph.cache import GraphCache
    from sapwood.state.graph.find import find_graph
    from sapwood.state.graph.sample import Sample

_WITH_TORCH = {
    "GraphCache": "sapwood.state.graph.cache",
    "Sample": "sapwood.state.graph.sample",
    "find_graph": "sapwood.state.graph.find",
}

__all__ = [
    "ID_BYTES",
    "Config",
    "EncodedGraph",
    "Graph",
    "GraphCache",
    "Hasher",
    "Kind",
    "Layer",
    "LayerTensor",
    "Match",
    "Sample",
    "Source",
    "TensorPair",
    "Tie",
    "decode_graph",
    "encode_graph",
    "find_graph",
    "match_graphs",
]


def __getattr__(name: str) -> Any:
    if name not in _WITH_TORCH:
        raise AttributeError(f"module 'sapwood.state.graph' has no attribute {name!r}")
    return getattr(import_module(_WITH_TORCH[name]), name)
