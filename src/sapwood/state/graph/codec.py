"""Compact bytes of a graph, in three parts.

``topology``: what feeds what, a few bytes a layer. ``configs``: one entry for each distinct
configuration, equal in all models that have such a layer, so a store keeps each once. ``labels``:
names and dtypes, which belong to one model. Ids are not written: they follow from the first two
(from all three where names tell layers apart), and a digest of them in the topology proves that
the parts belong together and are whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sapwood.errors import GraphError
from sapwood.state.graph.ids import ID_BYTES, Hasher, assign_ids
from sapwood.state.graph.model import Config, Graph, Kind, Layer, LayerTensor, Source, Tie
from sapwood.state.graph.packing import (
    PackReader,
    pack_config,
    pack_text,
    unpack_config,
    varint,
)

__all__ = ["EncodedGraph", "decode_graph", "encode_graph"]

_MAGIC = b"SG1"
_READS_VALUES = 1
_NAMED, _TIED, _SHORT_INPUTS = 8, 16, 5  # bits of a vertex's first byte; inputs from bit 5 on
_MANY = 7
_MOST_DESCRIBED = 1 << 20  # few bytes can refer to one long configuration very often
_CHECKSUM = 8
_KINDS = tuple(Kind)


class _Entry:
    """A configuration, and the tensors of a layer that owns all of its own: made once."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.size = len(config.tensors) + len(config.settings)
        self.tensors = tuple(LayerTensor(local=n, shape=shape) for n, shape in config.tensors)


@dataclass(frozen=True, slots=True)
class EncodedGraph:
    """A graph as bytes."""

    topology: bytes
    configs: tuple[bytes, ...]
    """In order of first use: the topology refers to them by index."""
    labels: bytes


def encode_graph(graph: Graph) -> EncodedGraph:
    """The bytes of a graph."""
    table: dict[Config, int] = {}
    head = bytes((graph.source, _READS_VALUES if graph.reads_values else 0))
    parts = [_MAGIC, head, _root(head, graph.vertices), varint(len(graph.vertices))]
    for n, layer in enumerate(graph.vertices):
        few = min(len(layer.inputs), _MANY)
        named, tied = _NAMED * layer.named, _TIED * bool(layer.ties)
        parts.append(bytes((layer.kind | named | tied | few << _SHORT_INPUTS,)))
        if few == _MANY:
            parts.append(varint(len(layer.inputs) - _MANY))
        if layer.config is not None:
            parts.append(varint(table.setdefault(layer.config, len(table))))
        if layer.kind is Kind.AGAIN:
            parts.append(varint(n - layer.of))
        parts += [varint(n - one) for one in layer.inputs]
        if layer.ties:
            parts.append(_packed_ties(n, layer, graph.vertices))
    configs = tuple(pack_config(config) for config in table)
    return EncodedGraph(b"".join(parts), configs, _packed_labels(graph))


def _root(head: bytes, vertices: Sequence[Layer]) -> bytes:
    return Hasher().digest(b"".join([b"graph", head, *(layer.id for layer in vertices)]))


def _packed_ties(n: int, layer: Layer, vertices: Sequence[Layer]) -> bytes:
    """Ties by position in the configurations' lists of tensors."""
    parts = [varint(len(layer.ties))]
    for tie in layer.ties:
        other = vertices[tie.layer]
        parts += [
            varint(_locals(layer.config).index(tie.local)),
            varint(n - tie.layer),
            varint(_locals(other.config).index(tie.owned)),
        ]
    return b"".join(parts)


def _locals(config: Config | None) -> list[str]:
    return [] if config is None else [local for local, _ in config.tensors]


def _packed_labels(graph: Graph) -> bytes:
    dtypes: dict[str, int] = {}
    parts: list[bytes] = []
    for layer in graph.vertices:
        if not layer.counts:
            continue
        parts.append(pack_text(layer.name))
        for tensor in layer.tensors:
            dtype = dtypes.setdefault(tensor.dtype, len(dtypes))
            parts.append(varint(dtype << 1 | tensor.buffer))
            # Most tensors have one name, the layer's and their own: that takes one byte.
            own = _own_name(layer.name, tensor.local)
            regular = bool(tensor.names) and tensor.names[0] == own
            names = tensor.names[1:] if regular else tensor.names
            parts += [varint(len(names) << 1 | regular), *map(pack_text, names)]
    packed = b"".join([varint(len(dtypes)), *map(pack_text, dtypes), *parts])
    return _checksum(packed) + packed


def _checksum(data: bytes) -> bytes:
    return Hasher().digest(b"labels" + data)[:_CHECKSUM]


def _own_name(layer: str, local: str) -> str:
    return f"{layer}.{local}" if layer else local


def decode_graph(
    topology: bytes,
    configs: Sequence[bytes],
    labels: bytes | None = None,
    *,
    hasher: Hasher | None = None,
) -> Graph:
    """The reverse of ``encode_graph``; without labels, layers have no names and no dtypes.

    The bytes may come from anywhere: nothing is allocated for numbers that the data cannot back.

    Raises:
        GraphError: a part is damaged, does not belong to the others, or labels are needed.
    """
    table = [_Entry(unpack_config(one)) for one in configs]
    reader = PackReader(topology, "a graph's topology")
    if reader.take(len(_MAGIC)) != _MAGIC:
        raise reader.fail(f"it does not begin with {_MAGIC!r}; it may be of a newer version")
    head = reader.take(2)
    source, flags = head
    if source not in tuple(Source) or flags & ~_READS_VALUES:
        raise reader.fail(f"source {source} and flags {flags} are not known")
    root = reader.take(ID_BYTES)
    vertices: list[Layer] = []
    described = 0
    for _ in range(reader.count("vertices")):
        layer = _vertex(reader, vertices, table)
        vertices.append(layer)
        if layer.config is not None:
            described += len(layer.config.tensors) + len(layer.config.settings)
        if described > _MOST_DESCRIBED:
            raise reader.fail(f"its layers have more than {_MOST_DESCRIBED} tensors and settings")
    reader.end()
    if labels is not None:
        vertices = _labelled(labels, vertices)
    elif any(layer.named for layer in vertices):
        raise GraphError(
            "this graph's ids cover names, and it is decoded without labels; give its labels"
        )
    done = assign_ids(Source(source), vertices, hasher or Hasher())
    if _root(head, done) != root:
        raise GraphError(
            "a graph's topology and configurations do not give the ids it was saved with: one of "
            "the parts is damaged or of another model; read them again from another copy"
        )
    return Graph(vertices=done, source=Source(source), reads_values=bool(flags & _READS_VALUES))


def _vertex(reader: PackReader, before: Sequence[Layer], table: Sequence[_Entry]) -> Layer:
    head, n = reader.byte(), len(before)
    number = head & 7
    if number >= len(_KINDS):
        raise reader.fail(f"vertex {n} is of kind {number}, which is not known")
    kind = _KINDS[number]
    count = head >> _SHORT_INPUTS
    if count == _MANY:
        count += reader.count("inputs")
    has_config = kind not in (Kind.JOIN, Kind.AGAIN)
    entry = table[reader.number(len(table), "configuration")] if has_config else None
    config = entry.config if entry is not None else None
    of = _back(reader, n) if kind is Kind.AGAIN else -1
    inputs = tuple(_back(reader, n) for _ in range(count))
    ties = _ties(reader, before, config) if head & _TIED else ()
    tied = {tie.local for tie in ties}
    tensors = entry.tensors if entry is not None and kind in (Kind.OWNER, Kind.UNUSED) else ()
    if tied:
        tensors = tuple(tensor for tensor in tensors if tensor.local not in tied)
    _check(reader, n, kind, inputs, before, of, ties)
    return Layer(
        kind=kind,
        id=b"",
        config=config,
        inputs=inputs,
        of=of,
        tensors=tensors,
        ties=ties,
        named=bool(head & _NAMED),
    )


def _back(reader: PackReader, n: int) -> int:
    """An earlier vertex, by its distance."""
    distance = reader.number(n + 1, "distance to an earlier vertex")
    if distance == 0:
        raise reader.fail("a vertex refers to itself")
    return n - distance


def _check(
    reader: PackReader,
    n: int,
    kind: Kind,
    inputs: tuple[int, ...],
    before: Sequence[Layer],
    of: int,
    ties: tuple[Tie, ...],
) -> None:
    good = len(set(inputs)) == len(inputs)
    if kind in (Kind.INPUT, Kind.UNUSED):
        good = not inputs
    elif kind is Kind.JOIN:
        good = good and len(inputs) > 1
    elif kind is Kind.AGAIN:
        good = good and before[of].kind is Kind.OWNER
    if ties and kind not in (Kind.OWNER, Kind.UNUSED):
        good = False
    if not good:
        raise reader.fail(f"vertex {n} cannot be a {kind.name.lower()} with inputs {inputs[:8]}")


def _ties(reader: PackReader, before: Sequence[Layer], config: Config | None) -> tuple[Tie, ...]:
    mine, n = _locals(config), len(before)
    found = []
    for _ in range(reader.count("ties")):
        local = mine[reader.number(len(mine), "tied tensor")]
        distance = reader.number(n + 1, "distance to a tied layer")
        other = config if distance == 0 else before[n - distance].config
        theirs = _locals(other)
        owned = theirs[reader.number(len(theirs), "tensor of a tied layer")]
        found.append(Tie(local, n - distance, owned))
    return tuple(found)


def _labelled(labels: bytes, vertices: Sequence[Layer]) -> list[Layer]:
    reader = PackReader(labels, "a graph's labels")
    if reader.take(_CHECKSUM) != _checksum(labels[_CHECKSUM:]):
        raise reader.fail("its checksum is wrong")  # ids do not cover names and dtypes
    dtypes = [reader.text() for _ in range(reader.count("dtypes"))]
    done: list[Layer] = []
    for layer in vertices:
        if not layer.counts:
            done.append(layer)
            continue
        name = reader.text()
        tensors = []
        for tensor in layer.tensors:
            kind = reader.number(2 * len(dtypes), "dtype")
            listed = reader.number(2 * reader.left + 2, "number of names")
            names = [reader.text() for _ in range(listed >> 1)]
            if listed & 1:
                names.insert(0, _own_name(name, tensor.local))
            tensors.append(
                LayerTensor(
                    local=tensor.local,
                    shape=tensor.shape,
                    dtype=dtypes[kind >> 1],
                    names=tuple(names),
                    buffer=bool(kind & 1),
                )
            )
        done.append(
            Layer(
                kind=layer.kind,
                id=b"",
                config=layer.config,
                inputs=layer.inputs,
                of=layer.of,
                ordinal=layer.ordinal,
                tensors=tuple(tensors),
                ties=layer.ties,
                name=name,
                named=layer.named,
            )
        )
    reader.end()
    return done
