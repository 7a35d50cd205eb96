"""Jobs, plans and progress as plain values, to go through a ``Wire``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from sapwood.checkpoint.engine.base import Durable, Failed, Freed, Job, NoRoom, Progress
from sapwood.state.catalog import Catalog
from sapwood.state.shards import Shard, ShardPlan
from sapwood.tiers.record import CheckpointId, Lineage
from sapwood.tiers.spec import NodeMap, TierSpec

__all__ = [
    "from_config",
    "from_job",
    "from_plan",
    "from_progress",
    "to_config",
    "to_id",
    "to_job",
    "to_plan",
    "to_progress",
]

_KINDS: dict[str, type[Freed] | type[Durable] | type[Failed] | type[NoRoom]] = {
    "freed": Freed,
    "durable": Durable,
    "failed": Failed,
    "no_room": NoRoom,
}


def from_plan(number: int, plan: ShardPlan, rank: int) -> dict[str, Any]:
    """A plan, with the pieces of one rank only: the others' are not its engine's business."""
    return {
        "op": "plan",
        "plan": number,
        "world": len(plan.shards),
        "rank": rank,
        "catalog": plan.catalog.to_json(),
        "pieces": plan.shards[rank].to_json(plan.catalog),
    }


def to_plan(message: Mapping[str, Any]) -> ShardPlan:
    """The reverse of ``from_plan``; the shards of other ranks are empty."""
    catalog = Catalog.from_json(message["catalog"])
    rank, world = int(message["rank"]), int(message["world"])
    if not 0 <= rank < world:
        raise ValueError(f"rank {rank} of {world}")
    mine = Shard.from_json(rank, catalog, message["pieces"])
    return ShardPlan(catalog, tuple(mine if r == rank else Shard(r, ()) for r in range(world)))


def from_job(job: Job, plan: int) -> dict[str, Any]:
    """A job, whose plan was sent before under this number."""
    return {
        "op": "submit",
        "plan": plan,
        "id": [job.id.step, job.id.attempt],
        "rank": job.rank,
        "arena": job.arena,
        "created": job.created,
        "extras": job.extras,
        "extras_bytes": job.extras_bytes,
        "tiers": job.tiers,
        "lineage": None if job.lineage is None else job.lineage.to_json(),
    }


def to_job(message: Mapping[str, Any], plan: ShardPlan) -> Job:
    """The reverse of ``from_job``."""
    rank, lineage = int(message["rank"]), message["lineage"]
    if not 0 <= rank < len(plan.shards) or not isinstance(message["extras"], dict):
        raise ValueError(f"rank {rank}, extras of type {type(message['extras']).__name__}")
    extras_bytes = int(message["extras_bytes"])
    if extras_bytes < 0:
        raise ValueError(f"extras of {extras_bytes} bytes")
    return Job(
        id=to_id(message["id"]),
        rank=rank,
        arena=int(message["arena"]),
        plan=plan,
        created=float(message["created"]),
        extras=message["extras"],
        extras_bytes=extras_bytes,
        tiers=tuple(str(name) for name in message["tiers"]),
        lineage=None if lineage is None else Lineage.from_json(lineage),
    )


def to_id(value: Sequence[Any]) -> CheckpointId:
    """A checkpoint's id from step and attempt."""
    step, attempt = value
    id = CheckpointId(int(step), str(attempt))
    if CheckpointId.parse(id.folder) != id:  # it becomes the name of a folder
        raise ValueError(f"{value} is no checkpoint")
    return id


def from_progress(progress: Progress) -> dict[str, Any]:
    """What became of something, for the rank that sent it."""
    op = next(name for name, kind in _KINDS.items() if isinstance(progress, kind))
    fields = asdict(progress)
    if not isinstance(progress, Freed):
        fields["id"] = [progress.id.step, progress.id.attempt]
    return {"op": op, **fields}


def to_progress(message: Mapping[str, Any]) -> Progress | None:
    """The reverse of ``from_progress``; None for any other message."""
    kind = _KINDS.get(message["op"])
    if kind is None:
        return None
    fields = {name: value for name, value in message.items() if name != "op"}
    if "id" in fields:
        fields["id"] = to_id(fields["id"])
    return kind(**fields)


def from_config(specs: Sequence[TierSpec], nodes: NodeMap) -> dict[str, Any]:
    """What an engine needs to make a node's tiers."""
    return {"specs": [asdict(spec) for spec in specs], "nodes": asdict(nodes)}


def to_config(message: Mapping[str, Any]) -> tuple[tuple[TierSpec, ...], NodeMap]:
    """The reverse of ``from_config``."""
    nodes = dict(message["nodes"])
    nodes["rank_nodes"] = tuple(nodes["rank_nodes"])
    return tuple(TierSpec(**spec) for spec in message["specs"]), NodeMap(**nodes)
