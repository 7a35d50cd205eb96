"""Which pieces of other ranks' shards a rank digests from its own replica, and digesting them.

At each checkpoint every shard has one witness, another rank each time: over ``world - 1`` of them
every rank has looked at every other one's shard. With ``mode="single"``, where rank 0 saves
everything, the others share its pieces among them.

All pieces are digested at every checkpoint, beside the copy of the same bucket and under the same
protection. That is the simplest way to see exactly the step's values, and it can be afforded: xxh3
takes half the time of the copy it follows, or a little more, so an update that comes first is held
for that much longer and no more.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from sapwood.state.contents import Contents, Key, byte_view, ordered_bytes
from sapwood.state.shards import Piece, ShardPlan
from sapwood.tiers.digest import FAST_ALGORITHM, fast_digest

__all__ = ["Part", "Parts", "Witness"]

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Part:
    """Some pieces of one rank's shard that are compared as one."""

    owner: int
    number: int
    pieces: tuple[Piece, ...]

    @cached_property
    def form(self) -> str:
        """Tells whether two ranks mean the same pieces and use the same digest."""
        rows = [[p.file, p.name, p.start, p.stop] for p in self.pieces]
        return f"{FAST_ALGORITHM}-{fast_digest(json.dumps(rows).encode())}"

    def brief(self, digests: Sequence[str]) -> str:
        """One digest of all pieces, with their form."""
        return f"{self.form}-{fast_digest(' '.join(digests).encode())}"


class Parts:
    """Who looks at what, for one plan; every rank computes the same."""

    def __init__(self, plan: ShardPlan, contents: Contents, *, single: bool, buffers: bool) -> None:
        """``buffers``: whether ranks are meant to have the same ones."""
        self._plan, self._contents = plan, contents
        self._world = len(plan.shards)
        self._single, self._buffers = single, buffers
        self._made: dict[int, list[Part]] = {}
        self._views: dict[Key, Any] = {}

    def of(self, owner: int) -> list[Part]:
        """The parts of a rank's shard: one, or with ``single`` one for each other rank."""
        if owner not in self._made:
            self._made[owner] = self._cut(owner)
        return self._made[owner]

    def _cut(self, owner: int) -> list[Part]:
        parameters = self._contents.by_parameter.values()
        owned = {key for keys in parameters for key in keys}
        shard = self._plan.shards[owner]
        wanted = [p for p in shard.pieces if p.nbytes and (self._buffers or p.key in owned)]
        if not self._single:
            return [Part(owner, 0, tuple(wanted))]
        others = self._world - 1 if owner == 0 else 0
        total, before = sum(p.nbytes for p in wanted), 0
        cut: list[list[Piece]] = [[] for _ in range(others)]
        for piece in wanted:
            cut[before * others // total].append(piece)
            before += piece.nbytes
        return [Part(owner, n, tuple(pieces)) for n, pieces in enumerate(cut)]

    def witness(self, rank: int, turn: int) -> Witness | None:
        """What ``rank`` looks at when so many checkpoints were due before; None: nothing."""
        if not self._single:
            owner = (rank + 1 + turn % (self._world - 1)) % self._world
            return Witness(self.of(owner)[0], self)
        parts = self.of(0)
        return Witness(parts[(rank - 1 + turn) % len(parts)], self) if rank else None

    def read(self, piece: Piece) -> Any:
        """The bytes of a piece in this rank's replica, as they are now."""
        view = self._views.get(piece.key)
        if view is None:
            tensor = self._contents.tensors[piece.key]
            ordered = byte_view(tensor)
            if ordered is None:
                ordered = ordered_bytes(tensor)
                return ordered[piece.start : piece.stop].cpu().numpy()
            if ordered.device.type != "cpu":
                return ordered[piece.start : piece.stop].cpu().numpy()
            # Only memory that is the tensor's own: a copy would keep the values of one step.
            view = self._views[piece.key] = ordered.numpy()
        return view[piece.start : piece.stop]


class Witness:
    """Digests another rank's pieces as this rank has them, bucket by bucket as it captures them.

    Called on any thread; it never raises, since a comparison must not spoil a checkpoint.
    """

    def __init__(self, part: Part, parts: Parts) -> None:
        """Nothing is digested yet."""
        self.part = part
        self._parts = parts
        self._wanted = {piece.key: piece for piece in part.pieces}
        self._found: dict[Key, str] = {}
        self._failed = False

    def look(self, keys: Iterable[Key]) -> None:
        """Digest what of these tensors is wanted; their values are the step's now."""
        try:
            for key in keys:
                piece = self._wanted.get(key)
                if piece is not None:
                    self._found[key] = fast_digest(self._parts.read(piece))
        except Exception:
            log.warning("a replica is not compared, its bytes cannot be read", exc_info=True)
            self._failed = True

    def digests(self) -> list[str] | None:
        """One for each piece of the part; None unless all were seen."""
        if self._failed or len(self._found) < len(self._wanted):
            return None
        return [self._found[piece.key] for piece in self.part.pieces]
