"""Architecture graphs in a repository: compact, with what layers are kept once for all models.

What a graph consists of is said in ``state.graph``. A manifest holds its topology and labels, and
the digests of the configurations it refers to, which the catalog keeps once for all models.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sapwood.errors import Damaged
from sapwood.state.graph import Graph

__all__ = ["PackedGraph", "configs_of", "layer_sizes", "pack_graph", "parts_of"]

_HEAD = struct.Struct("<II")  # bytes of the topology, number of configurations
_DIGEST = 16


@dataclass(frozen=True)
class PackedGraph:
    """A graph as a manifest has it, and the configurations it needs."""

    data: bytes
    configs: Mapping[bytes, bytes]
    """By digest."""


def pack_graph(graph: Graph) -> PackedGraph:
    """The bytes of a graph."""
    encoded = graph.encoded
    digests = [hashlib.blake2b(one, digest_size=_DIGEST).digest() for one in encoded.configs]
    head = _HEAD.pack(len(encoded.topology), len(digests))
    data = b"".join((head, encoded.topology, *digests, encoded.labels))
    return PackedGraph(data, dict(zip(digests, encoded.configs, strict=True)))


def configs_of(data: bytes) -> list[bytes]:
    """The digests of the configurations that a manifest's graph refers to, in its order.

    Raises:
        Damaged: it is no graph.
    """
    return parts_of(data)[1]


def parts_of(data: bytes) -> tuple[bytes, list[bytes], bytes]:
    """Topology, digests of configurations, and labels.

    Raises:
        Damaged: it is no graph.
    """
    if len(data) < _HEAD.size:
        raise Damaged("the graph of a stored model is truncated")
    topology, count = _HEAD.unpack_from(data)
    middle = _HEAD.size + topology
    end = middle + count * _DIGEST
    if end > len(data):
        raise Damaged("the graph of a stored model is truncated")
    digests = [data[at : at + _DIGEST] for at in range(middle, end, _DIGEST)]
    return data[_HEAD.size : middle], digests, data[end:]


def layer_sizes(graph: Graph, sizes: Mapping[str, int]) -> dict[bytes, int]:
    """Bytes of each layer's tensors, by the layer's id; ``sizes`` of tensors by name."""
    return {
        layer.id: sum(_size(tensor.names, sizes) for tensor in layer.tensors)
        for layer in graph.layers
    }


def _size(names: Sequence[str], sizes: Mapping[str, int]) -> int:
    return next((sizes[name] for name in names if name in sizes), 0)
