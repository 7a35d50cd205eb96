"""Builds a graph while something walks a forward: a trace, an exported program, or torch.fx.

A value between layers has an ``Origin``: the set of vertices whose results it was made from. A set
of several becomes one join vertex when a layer reads the value, and from then on the value comes
from the join alone: so a residual stream adds two edges a block, and which operations combined the
results (which differs between devices) does not matter.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from sapwood.state.graph.ids import Hasher, assign_ids
from sapwood.state.graph.model import Config, Graph, Kind, Layer, LayerTensor, Source, Tie

__all__ = ["GraphBuilder", "Origin", "Owner", "Slot"]

_JOINS_LOOKED_AT = 8


@dataclass(frozen=True, slots=True)
class Slot:
    """A tensor as one module holds it."""

    local: str
    tensor: int
    """Equal for slots that hold one tensor: ties."""
    shape: tuple[int, ...]
    dtype: str
    buffer: bool
    names: tuple[str, ...]
    """Its names through this module: more than one if the module is in the model twice."""


@dataclass(frozen=True, slots=True)
class Owner:
    """A module with tensors of its own."""

    name: str
    config: Config
    slots: tuple[Slot, ...]


@dataclass(eq=False, slots=True)
class Origin:
    """Where a value comes from; shared by values that come from the same place."""

    vertices: tuple[int, ...] = ()
    place: str | None = None
    """Of an input of the model that nothing has read yet: where it was passed."""


@dataclass(slots=True)
class _Use:
    """The first use of an owner."""

    vertex: int
    fed: frozenset[int]
    own: set[int] = field(default_factory=set)


class GraphBuilder:
    """Collects vertices in forward order."""

    def __init__(self, owners: Sequence[Owner]) -> None:
        """``owners`` are named by their index in what follows."""
        self.owners = owners
        self._vertices: list[Layer] = []
        self._known: dict[Hashable, int] = {}
        self._uses: dict[int, _Use] = {}
        self._joins: deque[tuple[frozenset[int], int]] = deque(maxlen=_JOINS_LOOKED_AT)
        self.reads_values = False
        """Set once the forward has looked at values: names are part of later ids."""
        self.by_name = False
        """Set if edges are not known: names are part of all ids."""

    def used(self, owner: int) -> int | None:
        """The vertex of an owner's first use, if there was one."""
        use = self._uses.get(owner)
        return None if use is None else use.vertex

    def elements(self, origin: Origin) -> tuple[int, ...]:
        """The vertices of an origin; an input gets its vertex here, where it is first read."""
        if origin.place is not None:
            config = Config("input", (("place", origin.place),))
            origin.place = None
            if config not in self._known:
                self._known[config] = self._add(Layer(kind=Kind.INPUT, id=b"", config=config))
            origin.vertices = (self._known[config],)
        return origin.vertices

    def union(self, origins: Iterable[Origin]) -> Origin | None:
        """The origin of a value made from several; None if there are none."""
        distinct = list(dict.fromkeys(origins))
        if len(distinct) <= 1:
            return distinct[0] if distinct else None
        together = sorted({v for origin in distinct for v in self.elements(origin)})
        for origin in distinct:
            if len(origin.vertices) == len(together):
                return origin  # it has all of them: a later join is shared
        return Origin(tuple(together))

    def plain(self, config: Config, inputs: Sequence[Origin], name: str = "") -> int:
        """A layer without tensors; equal ones on equal inputs are one, as they do the same."""
        settled = self._settle(inputs)
        key = (config, settled)
        if key not in self._known:
            self._known[key] = self._add(
                Layer(kind=Kind.PLAIN, id=b"", config=config, inputs=settled, name=name)
            )
        return self._known[key]

    def owner(self, owner: int, inputs: Sequence[Origin]) -> int:
        """A use of an owner.

        A further one that reads only what the first one read, and its own results, is the same
        vertex: the steps of a recurrent cell do not depend on the length of the sample.
        """
        read = frozenset(v for origin in inputs for v in self.elements(origin))
        use = self._uses.get(owner)
        if use is not None and read - use.own <= use.fed:
            return use.vertex
        settled = self._settle(inputs)
        if use is None:
            known, named = self.owners[owner], self.reads_values or self.by_name
            layer = Layer(
                kind=Kind.OWNER,
                id=b"",
                config=known.config,
                inputs=settled,
                name=known.name,
                named=named,
            )
            vertex = self._add(layer)
            self._uses[owner] = _Use(vertex, read | frozenset(settled), {vertex})
            return vertex
        key = (owner, settled)
        if key not in self._known:
            layer = Layer(kind=Kind.AGAIN, id=b"", of=use.vertex, inputs=settled)
            self._known[key] = self._add(layer)
            use.own.add(self._known[key])
        return self._known[key]

    def finish(self, source: Source, reason: str, hasher: Hasher) -> Graph:
        """The graph, with owners that were never used as isolated vertices."""
        used = sorted(self._uses, key=lambda owner: self._uses[owner].vertex)
        self._place(used)
        unused = [n for n in range(len(self.owners)) if n not in self._uses]
        unused.sort(key=lambda n: self.owners[n].name)
        self._add_unused(unused)
        return Graph(
            vertices=assign_ids(source, self._vertices, hasher),
            source=source,
            reason=reason,
            reads_values=self.reads_values,
        )

    def _add(self, layer: Layer) -> int:
        self._vertices.append(layer)
        return len(self._vertices) - 1

    def _settle(self, inputs: Sequence[Origin]) -> tuple[int, ...]:
        """The vertices a layer reads: one for each input, joined where it has several."""
        return tuple(dict.fromkeys(v for o in inputs if (v := self._joined(o)) is not None))

    def _joined(self, origin: Origin) -> int | None:
        parts = self.elements(origin)
        if len(parts) <= 1:
            return parts[0] if parts else None
        key = frozenset(parts)
        if key not in self._known:
            # A join of all that came before and one more (DenseNet) extends the one before.
            base = max(
                (j for j in self._joins if j[0] < key), key=lambda j: len(j[0]), default=None
            )
            rest = parts if base is None else sorted({*(key - base[0]), base[1]})
            self._known[key] = self._add(Layer(kind=Kind.JOIN, id=b"", inputs=tuple(rest)))
            self._joins.append((key, self._known[key]))
        origin.vertices = (self._known[key],)
        return self._known[key]

    def _place(self, used: Sequence[int]) -> None:
        """Give each tensor to the layer that is used first; the others are tied to it."""
        home: dict[int, tuple[int, str]] = {}
        names = self._names()
        for owner in used:
            vertex = self._uses[owner].vertex
            tensors, ties = [], []
            for slot in self.owners[owner].slots:
                if slot.tensor in home:
                    at, owned = home[slot.tensor]
                    ties.append(Tie(slot.local, at, owned))
                    continue
                home[slot.tensor] = (vertex, slot.local)
                tensors.append(_tensor(slot, names[slot.tensor]))
            self._vertices[vertex] = replace(
                self._vertices[vertex], tensors=tuple(tensors), ties=tuple(ties)
            )
        self._homes = home

    def _names(self) -> dict[int, list[str]]:
        names: dict[int, list[str]] = {}
        for owner in self.owners:
            for slot in owner.slots:
                names.setdefault(slot.tensor, []).extend(slot.names)
        return names

    def _add_unused(self, unused: Sequence[int]) -> None:
        names = self._names()
        added: list[Layer] = []
        for n in unused:
            owner, first = self.owners[n], len(self._vertices) + len(added)
            tensors, ties = [], []
            for slot in owner.slots:
                if slot.tensor in self._homes:
                    ties.append(Tie(slot.local, *self._homes[slot.tensor]))
                else:
                    self._homes[slot.tensor] = (first, slot.local)
                    tensors.append(_tensor(slot, names[slot.tensor]))
            if tensors:  # else all it has is another layer's, under a further name
                added.append(
                    Layer(
                        kind=Kind.UNUSED,
                        id=b"",
                        config=owner.config,
                        tensors=tuple(tensors),
                        ties=tuple(ties),
                        name=owner.name,
                        named=self.reads_values or self.by_name,
                    )
                )
        # Nothing but names tells unused layers of one configuration apart, or which of two tied
        # ones owns the tensor.
        kinds = Counter(layer.config for layer in added)
        shared = {tie.layer for layer in added for tie in layer.ties}
        start = len(self._vertices)
        for n, layer in enumerate(added, start):
            alike = kinds[layer.config] > 1 or n in shared
            tied = any(tie.layer >= start for tie in layer.ties)
            self._add(replace(layer, named=layer.named or alike or tied))


def _tensor(slot: Slot, names: Sequence[str]) -> LayerTensor:
    return LayerTensor(
        local=slot.local,
        shape=slot.shape,
        dtype=slot.dtype,
        names=tuple(dict.fromkeys((*slot.names, *names))),
        buffer=slot.buffer,
    )
