"""Copying a shard's pieces into staging memory, many small ones in one call."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from sapwood.buffers import Arena
from sapwood.state.contents import Contents, Key, byte_view, ordered_bytes
from sapwood.state.shards import Piece, Shard

__all__ = ["Batch", "Staging"]


class Batch:
    """Some pieces, copied together. The training thread does not need the GIL meanwhile."""

    def __init__(
        self, contents: Contents, keys: Sequence[Key], pieces: Sequence[Piece], arena: Arena
    ) -> None:
        """Prepare the views, so that copying is one call. ``keys``: also those of other shards."""
        self.keys = keys
        self.nbytes = sum(piece.nbytes for piece in pieces)
        memory = torch.from_numpy(arena.bytes)
        self._sources: list[Tensor] = []
        self._targets: list[Tensor] = []
        self._unordered: list[tuple[Tensor, Piece, Tensor]] = []
        for piece in pieces:
            if not piece.nbytes:
                continue
            target = memory[piece.at : piece.at + piece.nbytes]
            tensor = contents.tensors[piece.key]
            source = byte_view(tensor)
            if source is None:
                self._unordered.append((tensor, piece, target))
            else:
                self._sources.append(source[piece.start : piece.stop])
                self._targets.append(target)

    def copy(self) -> None:
        """Copy the bytes as they are now."""
        if self._sources:
            torch._foreach_copy_(self._targets, self._sources)
        for tensor, piece, target in self._unordered:
            target.copy_(ordered_bytes(tensor)[piece.start : piece.stop])


class Staging:
    """One arena and the batches that fill it with one rank's shard."""

    def __init__(self, contents: Contents, shard: Shard, arena: Arena, number: int) -> None:
        """``number`` is the arena's name at the engine."""
        self.arena = arena
        self.number = number
        self._contents = contents
        self._shard = shard
        self._made: dict[tuple[str, ...], Batch] = {}
        self._of_buffers: Batch | None = None
        owned = {key for keys in contents.by_parameter.values() for key in keys}
        self._others = [key for key in contents.tensors if key not in owned]

    def of_parameters(self, names: Sequence[str]) -> Batch:
        """The pieces of these parameters and their optimizer state."""
        names = tuple(names)
        batch = self._made.get(names)
        if batch is None:
            keys = (key for name in names for key in self._contents.by_parameter[name])
            batch = self._made[names] = self._batch(keys)
        return batch

    def of_buffers(self) -> Batch:
        """The pieces that belong to no parameter."""
        if self._of_buffers is None:
            self._of_buffers = self._batch(self._others)
        return self._of_buffers

    def _batch(self, keys: Iterable[Key]) -> Batch:
        keys = tuple(keys)
        pieces = [p for key in keys if (p := self._shard.by_key.get(key)) is not None]
        return Batch(self._contents, keys, pieces, self.arena)
