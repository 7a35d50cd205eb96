"""The record of a shard: which bytes it holds, their checksums, and what else belongs to the step.

A record is JSON, with a checksum of itself as the last member, so that a flipped bit in it is
noticed as surely as one in the data.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from sapwood.errors import CheckpointError
from sapwood.state.catalog import Catalog
from sapwood.state.shards import Piece, Shard
from sapwood.tiers.digest import DEFAULT_ALGORITHM, digest, seal_json, unseal
from sapwood.tiers.identity import CheckpointId, Lineage

__all__ = [
    "EXTRAS",
    "RANGE_BYTES",
    "CheckpointId",
    "Identity",
    "Lineage",
    "Range",
    "ShardRecord",
    "describe",
    "differing",
]

FORMAT = "sapwood-shard/2"
_READABLE = ("sapwood-shard/1", FORMAT)
"""Records of the first format have neither a lineage nor a digest of the catalog."""
RANGE_BYTES = 4 * 2**20
"""A checksum covers at most this much of one piece."""
EXTRAS = "extras"
"""In place of a tensor's file: the bytes are those the extras refer to, and of no tensor."""


Identity = tuple[CheckpointId, int, str, Lineage | None]
"""What the records of one checkpoint have in common: id, world, digest of the tensors, lineage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Range:
    """A part of a piece with a checksum of its own."""

    piece: Piece
    start: int
    """Offset in the piece."""
    nbytes: int
    digest: str

    @property
    def at(self) -> int:
        """Offset in the shard's memory."""
        return self.piece.at + self.start


@dataclass(frozen=True, kw_only=True)
class ShardRecord:
    """All there is to know about one rank's part of a checkpoint."""

    id: CheckpointId
    rank: int
    world: int
    catalog: Catalog
    shard: Shard
    digests: tuple[tuple[str, ...], ...]
    """Per piece, the checksums of its ranges."""
    algorithm: str = DEFAULT_ALGORITHM
    range_bytes: int = RANGE_BYTES
    created: float = 0.0
    extras: Mapping[str, Any] = field(default_factory=dict)
    """Plain values: step, random state, schedulers, position in the data, the user's own."""
    extras_bytes: int = 0
    """Size of the region the extras refer to; it lies behind the pieces in the shard's memory."""
    extras_digests: tuple[str, ...] = ()
    """The checksums of the region's ranges."""
    lineage: Lineage | None = None
    """Where the attempt came from; None in records of the first format."""
    catalog_digest: str = ""
    """Of the catalog, so that records can be compared without it; empty in the first format."""

    @property
    def identity(self) -> Identity:
        """What it has in common with the other records of its checkpoint."""
        return self.id, self.world, self.catalog_digest or self.catalog.digest, self.lineage

    @cached_property
    def ranges(self) -> tuple[Range, ...]:
        """Every range, in the order of the shard's memory; the last are those of the extras."""
        rows = zip(self.shard.pieces, self.digests, strict=True)
        found = [r for piece, marks in rows for r in _ranges(piece, marks, self.range_bytes)]
        return (*found, *self.extras_ranges)

    @cached_property
    def extras_ranges(self) -> tuple[Range, ...]:
        """The ranges of the region the extras refer to; none if they refer to nothing."""
        piece = _extras_piece(self.shard, self.extras_bytes)
        return tuple(_ranges(piece, self.extras_digests, self.range_bytes))

    @property
    def nbytes(self) -> int:
        """Size of the shard's memory."""
        return self.shard.nbytes_with(self.extras_bytes)

    def encode(self) -> bytes:
        """The record as a file's content."""
        head: dict[str, Any] = {
            "format": FORMAT,
            "step": self.id.step,
            "attempt": self.id.attempt,
            "rank": self.rank,
            "world": self.world,
            "created": self.created,
            "algorithm": self.algorithm,
            "range_bytes": self.range_bytes,
            "lineage": None if self.lineage is None else self.lineage.to_json(),
            "catalog_digest": self.catalog_digest,
        }
        if self.extras_bytes:
            head |= {"extras_bytes": self.extras_bytes, "extras_digests": self.extras_digests}
        tail = {
            "pieces": self.shard.to_json(self.catalog),
            "digests": self.digests,
            "extras": self.extras,
        }
        # One object; the list of tensors, which may be long, was encoded before.
        first, last = _json(head)[:-1], _json(tail)[1:]
        body = b"".join((first, b',"catalog":', self.catalog.text, b",", last))
        return seal_json(body, self.algorithm)

    @classmethod
    def decode(cls, content: bytes, what: str) -> ShardRecord:
        """The reverse of ``encode``; ``what`` names the record in errors.

        Raises:
            CheckpointError: it is truncated, was changed, or is no record at all.
        """
        body = unseal(content, what)
        try:
            return _decoded(json.loads(body))
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise CheckpointError(f"{what} is not a shard record: {error!r}") from error


def describe(
    *,
    id: CheckpointId,
    world: int,
    catalog: Catalog,
    shard: Shard,
    data: Any,
    created: float,
    extras: Mapping[str, Any],
    extras_bytes: int = 0,
    lineage: Lineage | None = None,
) -> ShardRecord:
    """The record of a shard whose memory is ``data``: this is where checksums are made."""
    memory = memoryview(data)
    pieces = (*shard.pieces, _extras_piece(shard, extras_bytes))
    *digests, last = (
        tuple(
            digest(memory[piece.at + start : piece.at + stop])
            for start, stop in _cuts(piece.nbytes, RANGE_BYTES)
        )
        for piece in pieces
    )
    return ShardRecord(
        id=id,
        rank=shard.rank,
        world=world,
        catalog=catalog,
        shard=shard,
        digests=tuple(digests),
        created=created,
        extras=extras,
        extras_bytes=extras_bytes,
        extras_digests=last,
        lineage=lineage,
        catalog_digest=catalog.digest,
    )


def _extras_piece(shard: Shard, nbytes: int) -> Piece:
    return Piece(file=EXTRAS, name="state", start=0, stop=nbytes, at=shard.extras_at)


def differing(one: Identity, other: Identity) -> str:
    """In what two identities differ, for a message."""
    kinds = ("id", "number of ranks", "list of tensors", "lineage")
    pairs = zip(kinds, one, other, strict=True)
    return " and ".join(kind for kind, here, there in pairs if here != there)


def _json(values: Mapping[str, Any]) -> bytes:
    return json.dumps(values, separators=(",", ":")).encode()


def _cuts(nbytes: int, size: int) -> list[tuple[int, int]]:
    return [(start, min(start + size, nbytes)) for start in range(0, nbytes, size)]


def _ranges(piece: Piece, marks: Sequence[str], size: int) -> Iterator[Range]:
    for (start, stop), mark in zip(_cuts(piece.nbytes, size), marks, strict=True):
        yield Range(piece=piece, start=start, nbytes=stop - start, digest=mark)


def _decoded(body: Mapping[str, Any]) -> ShardRecord:
    if body["format"] not in _READABLE:
        raise ValueError(f"its format is {body['format']!r}, expected one of {_READABLE}")
    lineage = body.get("lineage")
    catalog = Catalog.from_json(body["catalog"])
    return ShardRecord(
        id=CheckpointId(int(body["step"]), str(body["attempt"])),
        rank=int(body["rank"]),
        world=int(body["world"]),
        catalog=catalog,
        shard=Shard.from_json(int(body["rank"]), catalog, body["pieces"]),
        digests=tuple(tuple(map(str, marks)) for marks in body["digests"]),
        algorithm=str(body["algorithm"]),
        range_bytes=int(body["range_bytes"]),
        created=float(body["created"]),
        extras=body["extras"],
        extras_bytes=int(body.get("extras_bytes", 0)),
        extras_digests=tuple(map(str, body.get("extras_digests", ()))),
        lineage=None if lineage is None else Lineage.from_json(lineage),
        catalog_digest=str(body.get("catalog_digest", "")),
    )
