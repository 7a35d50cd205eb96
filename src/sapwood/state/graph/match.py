"""What two models have in common: the longest common prefix, and which tensor is which."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from sapwood.errors import GraphError
from sapwood.state.graph.model import Graph, Kind, Layer, LayerTensor

__all__ = ["Match", "TensorPair", "match_graphs"]


@dataclass(frozen=True, slots=True)
class TensorPair:
    """A tensor of an old model and the one of a new model that takes its values."""

    old: LayerTensor
    new: LayerTensor

    @property
    def same_dtype(self) -> bool:
        """Whether bytes can be copied as they are; shapes are always equal."""
        return self.old.dtype == self.new.dtype


@dataclass(frozen=True, kw_only=True)
class Match:
    """The common prefix of an old and a new graph."""

    old: Graph
    new: Graph
    vertices: tuple[tuple[int, int], ...]
    """Vertices of old and new with equal ids, in the new model's forward order."""
    refused: tuple[str, ...] = ()
    """Layers with equal ids that were left out, and why."""

    @cached_property
    def layers(self) -> tuple[tuple[Layer, Layer], ...]:
        """The layers in common, without inputs, joins and further uses."""
        pairs = ((self.old.vertices[a], self.new.vertices[b]) for a, b in self.vertices)
        return tuple((a, b) for a, b in pairs if b.counts)

    @cached_property
    def tensors(self) -> tuple[TensorPair, ...]:
        """What a transfer copies."""
        found = []
        for old, new in self.layers:
            by_local = {tensor.local: tensor for tensor in old.tensors}
            found += [TensorPair(by_local[tensor.local], tensor) for tensor in new.tensors]
        return tuple(found)

    @property
    def complete(self) -> bool:
        """Whether every layer of the new model has its match."""
        return len(self.layers) == sum(1 for _ in self.new.layers)


def match_graphs(old: Graph, new: Graph) -> Match:
    """The longest common prefix: all layers that have equal ids.

    An id covers the whole ancestry, so no walk is needed. Where a group of siblings has the same
    names in both models but in another forward order, the order of the calls was changed and the
    names tell who is who: such a group, and what depends on it, is left out and listed.

    Raises:
        GraphError: the graphs were found in different ways, or are not what they say.
    """
    if old.source is not new.source:
        raise GraphError(
            f"the old graph is {old.source.name.lower()} and the new one {new.source.name.lower()}:"
            " their ids cannot be compared; give find_graph the same kind of sample for both"
        )
    pairs = [
        (at, n)
        for n, layer in enumerate(new.vertices)
        if (at := old.by_id.get(layer.id)) is not None
    ]
    for a, b in pairs:
        _check(old.vertices[a], new.vertices[b])
    bad = _exchanged(old, new, pairs) | _permuted(old, new, pairs)
    kept, refused = [], []
    for a, b in pairs:
        layer = new.vertices[b]
        needs = (
            *layer.inputs,
            *((layer.of,) if layer.of >= 0 else ()),
            *(t.layer for t in layer.ties),
        )
        if b in bad:
            refused.append(bad[b])
        elif any(one in bad for one in needs):
            bad[b] = f"{layer.name or layer.kind.name.lower()}: depends on a layer left out"
            if layer.counts:
                refused.append(bad[b])
        else:
            kept.append((a, b))
    return Match(old=old, new=new, vertices=tuple(kept), refused=tuple(refused))


def _check(old: Layer, new: Layer) -> None:
    shapes = [{t.local: t.shape for t in layer.tensors} for layer in (old, new)]
    if shapes[0] != shapes[1]:
        raise GraphError(
            f"layers {old.name!r} and {new.name!r} have one id and different tensors, "
            f"{shapes[0]} and {shapes[1]}: a graph is damaged; find it again from its model"
        )


def _permuted(old: Graph, new: Graph, pairs: Sequence[tuple[int, int]]) -> dict[int, str]:
    groups: dict[object, list[tuple[int, int]]] = {}
    for a, b in pairs:
        layer = new.vertices[b]
        if layer.siblings > 1 and layer.kind is Kind.OWNER:
            groups.setdefault((layer.config, layer.inputs, layer.ties), []).append((a, b))
    bad: dict[int, str] = {}
    for group in groups.values():
        before = _short_names([old.vertices[a].name for a, _ in group])
        after = _short_names([new.vertices[b].name for _, b in group])
        crossed = [
            (x, y)
            for x, y in zip(before, after, strict=True)
            if x != y and (x in after or y in before)
        ]
        if crossed:
            x, y = crossed[0]
            bad |= {
                b: f"{new.vertices[b].name}: siblings are called in another order "
                f"({x!r} there is {y!r} here), names and order disagree"
                for _, b in group
            }
    return bad


def _exchanged(old: Graph, new: Graph, pairs: Sequence[tuple[int, int]]) -> dict[int, str]:
    """Pairs in which equal layers have each other's names: two towers on exchanged inputs."""
    owners = [(a, b) for a, b in pairs if new.vertices[b].tensors]
    goes = {old.vertices[a].name: new.vertices[b].name for a, b in owners}
    bad: dict[int, str] = {}
    for a, b in owners:
        start = old.vertices[a].name
        name, steps = goes[start], 1
        while name != start and name in goes and steps <= len(goes):
            name, steps = goes[name], steps + 1
        if name == start and steps > 1:
            bad[b] = (
                f"{new.vertices[b].name}: has the place of {start!r}, which is at another place "
                "here; names and inputs disagree"
            )
    return bad


def _short_names(names: Sequence[str]) -> list[str]:
    """Names without what all of them begin with: models may sit at different places."""
    parts = [name.split(".") for name in names]
    same = 0
    while all(len(p) > same + 1 and p[same] == parts[0][same] for p in parts):
        same += 1
    return [".".join(p[same:]) for p in parts]
