"""The cold form of tensors: what differs from an earlier version's, compressed."""

from __future__ import annotations

from sapwood.repository.cold.cooling import CHAIN, Cooled, Cooling, cool
from sapwood.repository.cold.reading import ColdReader

__all__ = ["CHAIN", "ColdReader", "Cooled", "Cooling", "cool"]
