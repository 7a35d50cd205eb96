"""What a version's note says of the checkpoint it is, and what those that are not whole are called.

A shard waits for those of other ranks as a hidden version, ``.shards/<series>/<id>@rank-0``, until
all are there and become one version that everybody sees.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sapwood.repository.base import ModelRecord
from sapwood.repository.names import HIDDEN, Reference
from sapwood.tiers.identity import CheckpointId

__all__ = [
    "STAGED",
    "Facts",
    "Origin",
    "StagedFacts",
    "home_of",
    "homes_in",
    "named",
    "series_of",
]

STAGED = f"{HIDDEN}shards"
_NOTE, _SHARD = "checkpoint", "shard"
_NAMED = "name:"
_RANK = re.compile(r"rank-(\d+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Whose checkpoints a tier keeps, and what their versions are called."""

    series: str
    """Which checkpoints of a repository are of one training, as those in one folder are."""
    name: str
    """Of the model; empty for the run's id."""
    forked: str = ""
    """``run@step``, if the training is a fork."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Which checkpoint a version is."""

    id: CheckpointId
    run: str
    series: str
    world: int
    created: float
    index: int
    """The tensor that says which tensor is what; see ``versions.index``."""

    def note(self) -> dict[str, Any]:
        """As the version's note has it."""
        return {
            _NOTE: {
                "id": str(self.id),
                "run": self.run,
                "series": self.series,
                "world": self.world,
                "created": self.created,
                "index": self.index,
            }
        }

    @classmethod
    def of(cls, record: ModelRecord) -> Facts | None:
        """The reverse; None for a version that is no checkpoint."""
        found = _fields(record, _NOTE)
        id = _id_in(found)
        if id is None:
            return None
        try:
            return cls(
                id=id,
                run=str(found["run"]),
                series=str(found["series"]),
                world=int(found["world"]),
                created=float(found["created"]),
                index=int(found["index"]),
            )
        except (KeyError, TypeError, ValueError):
            return None


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedFacts:
    """A shard that waits for the others, and all that is needed to make them a version."""

    id: CheckpointId
    rank: int
    origin: Origin
    created: float
    """When it was put, by the repository's clock."""
    reference: Reference

    @staticmethod
    def note(origin: Origin, id: CheckpointId) -> dict[str, Any]:
        """As the hidden version's note has it."""
        return {
            _SHARD: {
                "id": str(id),
                "series": origin.series,
                "name": origin.name,
                "forked": origin.forked,
            }
        }

    @staticmethod
    def version(rank: int) -> str:
        """The hidden version of a rank's shard."""
        return f"rank-{rank}"

    @classmethod
    def of(cls, record: ModelRecord) -> StagedFacts | None:
        """The facts of a hidden version; None for any other."""
        rank, found = _RANK.fullmatch(record.version), _fields(record, _SHARD)
        id = _id_in(found)
        if rank is None or id is None or not record.name.endswith(f"/{id}"):
            return None
        origin = Origin(
            series=str(found.get("series", "")),
            name=str(found.get("name", "")),
            forked=str(found.get("forked", "")),
        )
        return cls(
            id=id,
            rank=int(rank[1]),
            origin=origin,
            created=record.created,
            reference=record.reference,
        )


def series_of(name: str, place: str) -> str:
    """Which checkpoints are of one training: those of a name, or of a checkpointer's place."""
    return f"{_NAMED}{name}" if name else place


def named(series: str) -> str:
    """The model's name by which a series is one; empty if it is one by its place."""
    return series.removeprefix(_NAMED) if series.startswith(_NAMED) else ""


def homes_in(series: str) -> str:
    """Where the shards of a series wait, as a pattern of names; of all without one."""
    return f"{STAGED}/{_mark(series)}/*" if series else f"{STAGED}/*"


def home_of(series: str, id: CheckpointId) -> str:
    """The name of the hidden versions of one checkpoint's shards."""
    return f"{STAGED}/{_mark(series)}/{id}"


def _mark(series: str) -> str:
    return hashlib.blake2b(series.encode(), digest_size=8).hexdigest()


def _fields(record: ModelRecord, key: str) -> Mapping[str, Any]:
    """What a note has below a key; anybody may have written it."""
    found = record.note.get(key)
    return found if isinstance(found, dict) else {}


def _id_in(found: Mapping[str, Any]) -> CheckpointId | None:
    text = found.get("id")
    return CheckpointId.parse(text) if isinstance(text, str) else None
