"""Reading a rank's shard from the repository: from its version, or where it waits for the others.

A hidden version of a shard has its record as its first tensor, then one for each piece, and last
what the extras refer to. A piece that equals the same bytes of an earlier version is not stored
again: the earlier tensor, all of it, stands there in its place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from sapwood.errors import CheckpointError
from sapwood.repository.base import Backend
from sapwood.repository.manifest import Manifest
from sapwood.tiers.record import EXTRAS, Range, ShardRecord
from sapwood.tiers.versions.index import Version, read_blob, read_whole

__all__ = ["PiecePlace", "StagedShard", "VersionShard", "structure_of"]

_SHARED = "shared"


@dataclass(frozen=True, slots=True)
class PiecePlace:
    """Where a piece of a shard that waits is."""

    blob: int
    offset: int
    shared: bool
    """The blob is all of an earlier version's tensor, in which the piece is unchanged."""


class VersionShard:
    """A rank's part of a version. Fulfils ``StoredShard``."""

    def __init__(self, version: Version, rank: int, done: Callable[[], None]) -> None:
        """``done`` is called when it is closed.

        Raises:
            CheckpointError: the record is not there, or damaged.
        """
        self.record = version.shard_record(rank)
        self._version, self._done = version, _once(done)

    def read_into(self, part: Range, out: Any) -> None:
        """Read a range from the tensor it is a part of."""
        piece, version = part.piece, self._version
        if piece.file == EXTRAS:
            number = version.index.extras.get(self.record.rank)
            row = None if number is None else version.manifest.row(number)
        else:
            row = version.row(piece.key)
        if row is None:
            raise CheckpointError(f"{version.record.reference} lacks {piece.file} {piece.name}")
        read_blob(version.backend, row.blob, piece.start + part.start, out)

    def close(self) -> None:
        """Give back what reading needs."""
        self._done()


class StagedShard:
    """A shard that waits for those of other ranks. Fulfils ``StoredShard``."""

    def __init__(
        self,
        backend: Backend,
        manifest: Manifest,
        what: str,
        done: Callable[[], None] = lambda: None,
    ) -> None:
        """``what`` names it in errors; ``done`` is called when it is closed.

        Raises:
            CheckpointError: it is damaged.
        """
        self.backend, self.manifest = backend, manifest
        self._done = _once(done)
        if not manifest.dtypes:
            raise CheckpointError(f"{what} has no record")
        self.content = read_whole(backend, manifest.row(0))
        self.record = ShardRecord.decode(self.content, what)
        pieces = self.record.shard.pieces
        if len(manifest.dtypes) != 1 + len(pieces) + (self.record.extras_bytes > 0):
            raise CheckpointError(f"{what} is not what its record says")
        shared = _shared(manifest.structure, len(pieces), what)
        self.places = {
            piece: PiecePlace(
                manifest.blobs[number], piece.start if number in shared else 0, number in shared
            )
            for number, piece in enumerate(pieces, 1)
        }
        """Where the pieces are."""

    @property
    def extras_blob(self) -> int:
        """The blob of what the extras refer to, where there is some."""
        return self.manifest.row(len(self.manifest.dtypes) - 1).blob

    def read_into(self, part: Range, out: Any) -> None:
        """Read a range of a piece."""
        if part.piece.file == EXTRAS:
            blob, offset = self.extras_blob, 0
        else:
            place = self.places[part.piece]
            blob, offset = place.blob, place.offset
        read_blob(self.backend, blob, offset + part.start, out)

    def close(self) -> None:
        """Give back what reading needs."""
        self._done()


def structure_of(shared: Iterable[int]) -> dict[str, list[int]]:
    """What a hidden manifest says of its tensors: which of them are those of earlier versions."""
    return {_SHARED: sorted(shared)}


def _shared(structure: Any, pieces: int, what: str) -> set[int]:
    found = structure.get(_SHARED) if isinstance(structure, dict) else None
    if not isinstance(found, list) or not set(found) <= set(range(1, pieces + 1)):
        raise CheckpointError(f"{what} is damaged: it does not say which tensors it shares")
    return set(found)


def _once(done: Callable[[], None]) -> Callable[[], None]:
    left = [done]
    return lambda: left.pop()() if left else None
