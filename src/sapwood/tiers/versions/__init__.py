"""The store tier: every checkpoint a version in a model repository."""

from __future__ import annotations

from sapwood.tiers.versions.leftover import tidy
from sapwood.tiers.versions.tier import VersionTier

__all__ = ["VersionTier", "tidy"]
