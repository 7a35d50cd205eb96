"""Engines carry captured shards to their tiers: in a process of their own, or in the rank."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from sapwood.checkpoint.engine.address import find_address, resolved
from sapwood.checkpoint.engine.base import (
    Durable,
    Engine,
    Failed,
    Freed,
    Job,
    Listener,
    NoRoom,
    Progress,
)
from sapwood.checkpoint.engine.inrank import InRank
from sapwood.checkpoint.engine.messages import from_config
from sapwood.checkpoint.engine.node import NodeEngine
from sapwood.checkpoint.engine.pipeline import Pipeline
from sapwood.checkpoint.engine.reach import Reach
from sapwood.checkpoint.settings import CheckpointSettings
from sapwood.tiers.base import Tier
from sapwood.tiers.make import make_tiers, serve_peers
from sapwood.tiers.spec import NodeMap, TierSpec

logger = logging.getLogger(__name__)
__all__ = [
    "Durable",
    "Engine",
    "Failed",
    "Freed",
    "Job",
    "NoRoom",
    "Progress",
    "start_engine",
    "tiers_to_read",
]


def start_engine(
    *,
    specs: Sequence[TierSpec],
    nodes: NodeMap,
    settings: CheckpointSettings,
    listener: Listener,
    rank: int,
    token: str,
    log: Path | None = None,
) -> Engine:
    """The engine of this rank's node, started if it does not run yet.

    Args:
        specs: the tiers, cheapest first.
        nodes: who is where.
        settings: which engine, and how long it lives and waits.
        listener: hears what becomes of shards.
        rank: this rank.
        token: a secret of the group: an engine it starts takes shards from nobody else.
        log: where an engine of its own process writes what happens to it.

    Raises:
        CheckpointError: there is no engine, and none can be started.
    """
    if settings.engine == "sync":
        leads = rank == min(nodes.ranks, default=rank)
        peers = serve_peers(specs, nodes) if leads else ExitStack()
        tiers = make_tiers(specs, nodes)
        pairs = list(zip(specs, tiers, strict=True))
        pipeline = Pipeline(pairs, listener, on_close=peers.close)
        return InRank(pipeline, listener, timeout=settings.drain_timeout)
    places = resolved(specs)
    reach = Reach(
        address=find_address(places, nodes),
        token=token,
        linger=settings.linger,
        log=None if log is None else log.resolve(),
        first=rank == min(nodes.ranks, default=rank),
    )
    return NodeEngine(reach, from_config(places, nodes), listener)


def tiers_to_read(
    engine: Engine, specs: Sequence[TierSpec], nodes: NodeMap, *, timeout: float
) -> list[Tier]:
    """The tiers to restore from; with an engine, after what it still carried for a dead group.

    Waits for it up to ``timeout`` seconds.
    """
    tiers = make_tiers(specs, nodes)
    if not isinstance(engine, NodeEngine):
        return tiers
    if not engine.settle(timeout):
        logger.warning("the engine still has checkpoints on their way; the newest may be missed")
    return [
        engine.memory() if spec.kind == "memory" else t
        for spec, t in zip(specs, tiers, strict=True)
    ]
