"""Layer ids: a Merkle hash of what a layer is and where its inputs come from.

What is hashed: the source of the graph, the vertex's kind, its configuration (class, structural
attributes, shapes), the ids of its inputs, what it is tied to, and which of how many siblings it
is. What is not: names, creation order, device, dtype, batch size, versions, ``training`` and
``requires_grad``.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from sapwood.errors import GraphError
from sapwood.state.graph.model import Config, Kind, Layer, Source
from sapwood.state.graph.packing import pack_config, varint

__all__ = ["ID_BYTES", "Hasher", "assign_ids"]

ID_BYTES = 16
_SCHEME = b"sapwood.layer.1"  # a change of what is hashed gets another number: ids never mix
_REMEMBERED = 1 << 20


@dataclass
class Hasher:
    """Hashes, and remembers what it has hashed: a layer seen before costs a look-up.

    The key of a look-up is the whole of what would be hashed, so a hit cannot be stale.
    """

    computed: int = 0
    """How many digests were computed, and not looked up."""

    def __post_init__(self) -> None:
        """Start with nothing remembered."""
        self._known: dict[bytes, bytes] = {}
        self._configs: dict[Config, bytes] = {}

    def digest(self, payload: bytes) -> bytes:
        """128 bits of BLAKE2b."""
        found = self._known.get(payload)
        if found is None:
            self.computed += 1
            found = hashlib.blake2b(payload, digest_size=ID_BYTES, person=_SCHEME).digest()
            if len(self._known) >= _REMEMBERED:
                self._known.clear()
            self._known[payload] = found
        return found

    def config(self, config: Config) -> bytes:
        """The digest of a configuration."""
        found = self._configs.get(config)
        if found is None:
            if len(self._configs) >= _REMEMBERED:
                self._configs.clear()
            found = self._configs[config] = self.digest(b"config" + pack_config(config))
        return found


def assign_ids(source: Source, vertices: Sequence[Layer], hasher: Hasher) -> tuple[Layer, ...]:
    """The vertices with their siblings counted and their ids.

    An id covers how many siblings there are: of q, k and v next to q, k, v and one more, nobody
    knows who is who, so none of them matches.
    """
    groups = [_group(layer) for layer in vertices]
    sizes = Counter(group for group in groups if group is not None)
    seen: Counter[object] = Counter()
    ids: list[bytes] = []
    done: list[Layer] = []
    for layer, group in zip(vertices, groups, strict=True):
        ordinal, siblings = layer.ordinal, 1
        if group is not None:
            siblings, ordinal = sizes[group], seen[group]
            seen[group] += 1
        payload = _payload(source, layer, ids, ordinal, siblings, hasher)
        ids.append(hasher.digest(payload))
        done.append(
            Layer(
                kind=layer.kind,
                id=ids[-1],
                config=layer.config,
                inputs=layer.inputs,
                of=layer.of,
                ordinal=ordinal,
                siblings=siblings,
                tensors=layer.tensors,
                ties=layer.ties,
                name=layer.name,
                named=layer.named,
            )
        )
    if len(set(ids)) != len(ids):
        first = {one: n for n, one in reversed(list(enumerate(ids)))}
        twice = next(n for n, one in enumerate(ids) if first[one] != n)
        raise GraphError(
            f"vertex {twice} ({done[twice].name or done[twice].kind.name}) has the id of another: "
            "the graph lists one layer twice"
        )
    return tuple(done)


def _group(layer: Layer) -> object:
    """What siblings share; None where there are no siblings: a name tells such layers apart."""
    if layer.kind not in (Kind.OWNER, Kind.UNUSED) or layer.named:
        return None
    return layer.kind, layer.config, layer.inputs, layer.ties


def _payload(
    source: Source,
    layer: Layer,
    ids: Sequence[bytes],
    ordinal: int,
    siblings: int,
    hasher: Hasher,
) -> bytes:
    # Every part has a fixed size or says its length, so that no two layers give the same bytes.
    parts = [bytes((source, layer.kind, layer.named)), varint(ordinal), varint(siblings)]
    if layer.named:
        name = layer.name.encode()
        parts += [varint(len(name)), name]
    if layer.config is not None:
        parts.append(hasher.config(layer.config))
    if layer.of >= 0:
        parts.append(ids[layer.of])
    inputs = [ids[n] for n in layer.inputs]
    if layer.kind is Kind.JOIN:
        inputs.sort()
    parts += [varint(len(inputs)), *inputs, varint(len(layer.ties))]
    for tie in layer.ties:
        local, owned = tie.local.encode(), tie.owned.encode()
        # A module may hold one tensor twice; its own id is not known yet.
        other = ids[tie.layer] if tie.layer < len(ids) else bytes(ID_BYTES)
        parts += [varint(len(local)), local, other, varint(len(owned)), owned]
    return b"".join(parts)
