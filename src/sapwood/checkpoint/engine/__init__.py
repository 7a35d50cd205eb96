"""Engines carry captured shards to their tiers: in a process of their own, or in the rank."""

from __future__ import annotations

from collections.abc import Sequence

from sapwood.checkpoint.engine.base import Durable, Engine, Failed, Freed, Job, Listener, Progress
from sapwood.checkpoint.engine.inrank import InRank
from sapwood.checkpoint.engine.pipeline import Pipeline
from sapwood.checkpoint.settings import CheckpointSettings
from sapwood.tiers.make import make_tiers
from sapwood.tiers.spec import NodeMap, TierSpec

__all__ = ["Durable", "Engine", "Failed", "Freed", "Job", "Progress", "start_engine"]


def start_engine(
    *,
    specs: Sequence[TierSpec],
    nodes: NodeMap,
    settings: CheckpointSettings,
    listener: Listener,
) -> Engine:
    """The engine of this rank's node, started if it does not run yet."""
    tiers = make_tiers(specs, nodes)
    pipeline = Pipeline(list(zip(specs, tiers, strict=True)), listener)
    return InRank(pipeline, listener, timeout=settings.drain_timeout)
