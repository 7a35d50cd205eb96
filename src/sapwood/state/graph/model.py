"""The architecture graph of a model: plain data, without torch.

Vertices are in the order in which the forward first reaches them, so every input of a vertex comes
before it. Names and dtypes are carried along; they are not part of an id, except where ``named``
says so.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sapwood.state.graph.codec import EncodedGraph

__all__ = ["Config", "Graph", "Kind", "Layer", "LayerTensor", "Source", "Tie"]


class Source(enum.IntEnum):
    """How a graph was found. Ids of different sources are never equal."""

    TRACED = 1
    """One forward, on the sample's shapes or on the sample."""
    EXPORTED = 2
    """An ``ExportedProgram`` the caller supplied."""
    SYMBOLIC = 3
    """``torch.fx``."""
    TREE = 4
    """The order of the module tree: approximate."""


class Kind(enum.IntEnum):
    """What a vertex stands for."""

    INPUT = 0
    """A floating-point input of the model, as an argument of its forward."""
    JOIN = 1
    """Several layers' results combined: it keeps the edges of residual streams linear."""
    PLAIN = 2
    """A layer without tensors of its own."""
    OWNER = 3
    """A layer with tensors, where the forward first uses it."""
    AGAIN = 4
    """A further use of an owner, whose tensors are listed there."""
    UNUSED = 5
    """A layer with tensors that the forward does not use: isolated."""


@dataclass(frozen=True, slots=True)
class Config:
    """What a layer is, apart from where it is: equal for equal layers of any model."""

    kind: str
    """The qualified class, or the name of a function."""
    settings: tuple[tuple[str, str], ...] = ()
    """Structural attributes, sorted by name."""
    tensors: tuple[tuple[str, tuple[int, ...]], ...] = ()
    """Local name and shape of every tensor of the module, sorted by name; tied ones too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerTensor:
    """A tensor that a layer owns."""

    local: str
    """Its name in the layer."""
    shape: tuple[int, ...]
    dtype: str = ""
    """torch's name of it, as ``float32``; not part of any id."""
    names: tuple[str, ...] = ()
    """Its names in the model: the layer's own first, then those of layers it is tied to."""
    buffer: bool = False
    """Whether it is a persistent buffer and not a parameter."""


@dataclass(frozen=True, slots=True)
class Tie:
    """A tensor that a layer uses and another layer owns."""

    local: str
    """Its name in this layer."""
    layer: int
    """The vertex that owns it."""
    owned: str
    """Its name there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One vertex."""

    kind: Kind
    id: bytes
    """128 bits: equal for layers with equal configuration and ancestry."""
    config: Config | None = None
    """None for joins and further uses. An input's says where it is passed."""
    inputs: tuple[int, ...] = ()
    """Vertices whose results this one reads: in the order of the call, those of a join sorted."""
    of: int = -1
    """The owner that a further use is of."""
    ordinal: int = 0
    """Which of its siblings (owners of equal configuration and inputs) it is, in forward order."""
    siblings: int = 1
    """How many there are, with itself."""
    tensors: tuple[LayerTensor, ...] = ()
    ties: tuple[Tie, ...] = ()
    name: str = ""
    """The module's name, where it has one."""
    named: bool = False
    """Whether the id covers the name, because nothing else tells the layer from others."""

    @property
    def counts(self) -> bool:
        """Whether it is a layer of the model, and not an input, a join or a further use."""
        return self.kind in (Kind.PLAIN, Kind.OWNER, Kind.UNUSED)


@dataclass(frozen=True, kw_only=True)
class Graph:
    """The layers of a model and how they feed each other. Immutable."""

    vertices: tuple[Layer, ...]
    source: Source
    reason: str = field(default="", compare=False)
    """Why this source was taken: what the better ones failed at."""
    reads_values: bool = False
    """Whether the forward looked at values: then another batch may take another way."""

    @property
    def approximate(self) -> bool:
        """Whether edges are only the order of the module tree."""
        return self.source is Source.TREE

    @property
    def layers(self) -> Iterator[Layer]:
        """The layers of the model, with and without tensors, in forward order."""
        return (layer for layer in self.vertices if layer.counts)

    @cached_property
    def by_id(self) -> dict[bytes, int]:
        """The vertex of each id."""
        return {layer.id: n for n, layer in enumerate(self.vertices)}

    @cached_property
    def ids(self) -> tuple[bytes, ...]:
        """Ids of ``layers``, in their order: what an index of models holds."""
        return tuple(layer.id for layer in self.layers)

    @cached_property
    def tensors(self) -> dict[str, tuple[int, LayerTensor]]:
        """Every tensor by each of its names, with the vertex that owns it."""
        owned = ((n, t) for n, layer in enumerate(self.vertices) for t in layer.tensors)
        return {name: (n, tensor) for n, tensor in owned for name in tensor.names}

    @cached_property
    def encoded(self) -> EncodedGraph:
        """The graph as bytes, made once."""
        from sapwood.state.graph.codec import encode_graph  # it is built on this module

        return encode_graph(self)

    @property
    def edges(self) -> int:
        """How many edges there are."""
        return sum(len(layer.inputs) for layer in self.vertices)
