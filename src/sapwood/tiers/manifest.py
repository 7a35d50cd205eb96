"""The manifest of a complete checkpoint: what belongs to it, written last."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sapwood.errors import CheckpointError
from sapwood.state.catalog import Catalog
from sapwood.tiers.digest import DEFAULT_ALGORITHM, digest, seal_json, unseal
from sapwood.tiers.record import CheckpointId, Lineage, ShardRecord

__all__ = ["MANIFEST", "Manifest", "check_agreement", "join"]

MANIFEST = "manifest.json"
"""The name of its file."""
FORMAT = "sapwood-checkpoint/1"
_CATALOG = b',"catalog":'


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The files and shards of one checkpoint."""

    id: CheckpointId
    world: int
    created: float
    files: Mapping[str, int]
    """Sizes by name."""
    records: tuple[str, ...]
    """The checksum of each rank's record, as it is on disk."""
    algorithm: str = DEFAULT_ALGORITHM
    lineage: Lineage | None = None
    """Where the attempt came from; None if its records do not say."""

    def encode(self) -> bytes:
        """The manifest as a file's content."""
        body = {
            "format": FORMAT,
            "step": self.id.step,
            "attempt": self.id.attempt,
            "world": self.world,
            "created": self.created,
            "files": dict(self.files),
            "algorithm": self.algorithm,
            "records": list(self.records),
            "lineage": None if self.lineage is None else self.lineage.to_json(),
        }
        return seal_json(json.dumps(body, indent=1).encode(), self.algorithm)

    @classmethod
    def decode(cls, content: bytes, what: str) -> Manifest:
        """The reverse of ``encode``; ``what`` names the manifest in errors.

        Raises:
            CheckpointError: it is truncated, was changed, or is no manifest at all.
        """
        body = unseal(content, what)
        try:
            return _decoded(json.loads(body))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CheckpointError(f"{what} is not a checkpoint's manifest: {error!r}") from error


def join(contents: Mapping[int, bytes], first: ShardRecord, what: str) -> Manifest:
    """The manifest of the records of all ranks, given as they are on disk.

    It follows from the records alone: whoever makes it makes the same. ``first`` is any of them.

    Raises:
        CheckpointError: a record is damaged, or they do not belong together; it names the ranks.
    """
    created = check_agreement(contents, first, what)
    if sorted(contents) != list(range(first.world)):
        raise CheckpointError(f"{what} has ranks {sorted(contents)} of {first.world}")
    return Manifest(
        id=first.id,
        world=first.world,
        created=created,
        files={each.filename: each.size for each in first.catalog.layouts.values()},
        records=tuple(digest(content) for _, content in sorted(contents.items())),
        lineage=first.lineage,
    )


def check_agreement(contents: Mapping[int, bytes], first: ShardRecord, what: str) -> float:
    """See that records, given as they are on disk, belong to one checkpoint; when it was made.

    They are only compared with ``first``: decoding the tensors of all ranks would take long.

    Raises:
        CheckpointError: a record is damaged, or they do not belong together; it names the ranks.
    """
    id, lineage = first.id, first.lineage
    tensors = {"world": first.world, "catalog": True}
    identity = {
        "step": id.step,
        "attempt": id.attempt,
        "lineage": None if lineage is None else lineage.to_json(),
    }
    created: list[float] = [first.created]
    strange: list[int] = []
    others: list[int] = []
    for rank, content in sorted(contents.items()):
        body = unseal(content, f"the record of rank {rank} in {what}")
        if rank == first.rank:
            continue
        facts = _facts(body, first.catalog)
        created.append(float(facts["created"]))
        if any(facts.get(key) != value for key, value in {**identity, "rank": rank}.items()):
            strange.append(rank)
        elif any(facts[key] != value for key, value in tensors.items()):
            others.append(rank)
    if strange:
        raise CheckpointError(
            f"the shards in {what} are not of one checkpoint: those of ranks {strange} were "
            f"written for another one than {id} of rank {first.rank}, or by another rank; files "
            "were moved"
        )
    if others:
        raise CheckpointError(
            f"the shards in {what} are not of one checkpoint: ranks {others} have other tensors "
            f"or another number of ranks than rank {first.rank}, which says {first.world} ranks; "
            "all ranks of a run must save the same model"
        )
    return max(created)


def _facts(body: bytes, catalog: Catalog) -> dict[str, Any]:
    """A record's fields; in place of its tensors, whether they are those of ``catalog``.

    The list of tensors is long, and records of one run have the same text there, which is compared
    as it is. Any other text is read.
    """
    head, _, tail = body.partition(_CATALOG)
    if tail.startswith(catalog.text + b',"pieces":'):
        return {**json.loads(head + b"}"), "catalog": True}
    found: dict[str, Any] = json.loads(body)
    return {**found, "catalog": found["catalog"] == catalog.to_json()}


def _decoded(body: Mapping[str, Any]) -> Manifest:
    if body["format"] != FORMAT:
        raise ValueError(f"its format is {body['format']!r}, expected {FORMAT!r}")
    if not body["records"] or len(body["records"]) != body["world"]:
        raise ValueError(f"it has {len(body['records'])} records of {body['world']}")
    return Manifest(
        id=CheckpointId(int(body["step"]), str(body["attempt"])),
        world=int(body["world"]),
        created=float(body["created"]),
        files={str(name): int(size) for name, size in body["files"].items()},
        records=tuple(map(str, body["records"])),
        algorithm=str(body["algorithm"]),
        lineage=None if body.get("lineage") is None else Lineage.from_json(body["lineage"]),
    )
