"""The record of a shard: which bytes it holds, their checksums, and what else belongs to the step.

A record is JSON, with a checksum of itself as the last member, so that a flipped bit in it is
noticed as surely as one in the data.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from sapwood.errors import CheckpointError
from sapwood.state.catalog import Catalog
from sapwood.state.shards import Piece, Shard
from sapwood.tiers.digest import DEFAULT_ALGORITHM, digest, seal_json, unseal

__all__ = ["RANGE_BYTES", "CheckpointId", "Range", "ShardRecord", "describe"]

FORMAT = "sapwood-shard/1"
RANGE_BYTES = 4 * 2**20
"""A checksum covers at most this much of one piece."""
_FOLDER = re.compile(r"(\d{8,})-([0-9a-f]{6})")


@dataclass(frozen=True, order=True)
class CheckpointId:
    """A step of one attempt: a run that was restored and comes to a step again never overwrites."""

    step: int
    attempt: str
    """Six hexadecimal digits, drawn when a checkpointer starts."""

    @property
    def folder(self) -> str:
        """The name of its folder."""
        return f"{self.step:08d}-{self.attempt}"

    @classmethod
    def parse(cls, folder: str) -> CheckpointId | None:
        """The id behind a folder's name; None for any other name."""
        found = _FOLDER.fullmatch(folder)
        return cls(int(found[1]), found[2]) if found else None

    def __str__(self) -> str:
        """As the command line shows it."""
        return self.folder


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

    @cached_property
    def ranges(self) -> tuple[Range, ...]:
        """Every range, in the order of the shard's memory."""
        rows = zip(self.shard.pieces, self.digests, strict=True)
        return tuple(r for piece, marks in rows for r in _ranges(piece, marks, self.range_bytes))

    @property
    def nbytes(self) -> int:
        """Size of the shard's memory."""
        return self.shard.nbytes

    def encode(self) -> bytes:
        """The record as a file's content."""
        head = {
            "format": FORMAT,
            "step": self.id.step,
            "attempt": self.id.attempt,
            "rank": self.rank,
            "world": self.world,
            "created": self.created,
            "algorithm": self.algorithm,
            "range_bytes": self.range_bytes,
        }
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
) -> ShardRecord:
    """The record of a shard whose memory is ``data``: this is where checksums are made."""
    memory = memoryview(data)
    digests = tuple(
        tuple(
            digest(memory[piece.at + start : piece.at + stop])
            for start, stop in _cuts(piece.nbytes, RANGE_BYTES)
        )
        for piece in shard.pieces
    )
    return ShardRecord(
        id=id,
        rank=shard.rank,
        world=world,
        catalog=catalog,
        shard=shard,
        digests=digests,
        created=created,
        extras=extras,
    )


def _json(values: Mapping[str, Any]) -> bytes:
    return json.dumps(values, separators=(",", ":")).encode()


def _cuts(nbytes: int, size: int) -> list[tuple[int, int]]:
    return [(start, min(start + size, nbytes)) for start in range(0, nbytes, size)]


def _ranges(piece: Piece, marks: Sequence[str], size: int) -> Iterator[Range]:
    for (start, stop), mark in zip(_cuts(piece.nbytes, size), marks, strict=True):
        yield Range(piece=piece, start=start, nbytes=stop - start, digest=mark)


def _decoded(body: Mapping[str, Any]) -> ShardRecord:
    if body["format"] != FORMAT:
        raise ValueError(f"its format is {body['format']!r}, expected {FORMAT!r}")
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
    )
