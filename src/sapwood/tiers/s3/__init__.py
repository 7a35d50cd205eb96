"""The s3 tier: any object store that speaks S3."""

from __future__ import annotations

from sapwood.tiers.s3.shard import S3Shard
from sapwood.tiers.s3.tier import S3Tier

__all__ = ["S3Shard", "S3Tier"]
