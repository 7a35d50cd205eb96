"""Tiers from their settings."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from sapwood.errors import ConfigError
from sapwood.tiers.base import Tier
from sapwood.tiers.local import LocalTier
from sapwood.tiers.memory import MemoryTier
from sapwood.tiers.packed import PackedTier
from sapwood.tiers.spec import NodeMap, TierSpec

__all__ = ["make_tiers"]


def make_tiers(specs: Sequence[TierSpec], nodes: NodeMap) -> list[Tier]:
    """The tiers of one node, in the order given, which goes from cheap to expensive."""
    return [_make(spec, nodes) for spec in specs]


def _make(spec: TierSpec, nodes: NodeMap) -> Tier:
    if spec.kind == "memory":
        return MemoryTier()
    if spec.kind == "local":
        folder = Path(spec.place) / nodes.node
        if spec.incremental or spec.compress:
            return PackedTier(folder, incremental=spec.incremental, compress=spec.compress)
        return LocalTier(folder)
    if spec.kind == "external":
        return LocalTier(Path(spec.place), name="external")
    raise ConfigError(f"tier {spec.kind!r} is not available yet")
