"""Tiers from their settings."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from sapwood.errors import ConfigError
from sapwood.tiers.base import Tier
from sapwood.tiers.local import LocalTier
from sapwood.tiers.memory import MemoryTier
from sapwood.tiers.spec import NodeMap, TierSpec

__all__ = ["make_tiers"]


def make_tiers(specs: Sequence[TierSpec], nodes: NodeMap) -> list[Tier]:
    """The tiers of one node, in the order given, which goes from cheap to expensive."""
    return [_make(spec, nodes) for spec in specs]


def _make(spec: TierSpec, nodes: NodeMap) -> Tier:
    if spec.kind == "memory":
        return MemoryTier()
    if spec.kind == "local":
        return LocalTier(Path(spec.place) / nodes.node)
    if spec.kind == "external":
        return LocalTier(Path(spec.place), name="external")
    if spec.kind == "s3":
        from sapwood.tiers.s3 import S3Tier  # it imports obstore, which is an extra

        return S3Tier(spec.place)
    raise ConfigError(f"tier {spec.kind!r} is not available yet")
