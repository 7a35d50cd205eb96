"""What a pool of shared memory has and did."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["PoolStats"]


@dataclass(frozen=True, kw_only=True)
class PoolStats:
    """What a pool has and did; all sizes in bytes."""

    policy: str
    limit: int
    reserved: int
    """Memory that is the pool's, used or not."""
    in_use: int
    """What extents take, with what alignment adds."""
    asked: int
    """What extents in use were asked for."""
    high_water: int
    """The most that was in use."""
    largest_free: int
    """The longest extent that needs no growing."""
    lingering: int
    """Part of ``in_use`` that was released, and of which arrays or tensors are left."""
    huge: int
    """Part of ``reserved`` that is in huge pages."""
    segments: int
    holds: int
    """Extents and leases that were not released."""
    allocations: int
    grown_ahead: int
    """Memory that was there before it was needed."""
    grown_late: int
    """Memory that an allocation had to wait for."""
    seconds: float
    """What making memory took, wherever it was done."""

    @property
    def free(self) -> int:
        """What is reserved and not in use."""
        return self.reserved - self.in_use

    @property
    def fragmentation(self) -> float:
        """How much of what is free is not part of the longest free run; 0 where it is one run."""
        return 1 - self.largest_free / self.free if self.free > 0 else 0.0
