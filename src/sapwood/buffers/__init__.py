"""Staging memory that another process can take over, and pools of it."""

from sapwood.buffers.arena import Arena
from sapwood.buffers.copying import copy_many
from sapwood.buffers.extent import Extent
from sapwood.buffers.faults import FaultCount
from sapwood.buffers.handover import Handover, HandoverPool, HandoverStats
from sapwood.buffers.pack import Pack
from sapwood.buffers.segments import SegmentPool
from sapwood.buffers.stats import PoolStats
from sapwood.buffers.view import SegmentView

__all__ = [
    "Arena",
    "Extent",
    "FaultCount",
    "Handover",
    "HandoverPool",
    "HandoverStats",
    "Pack",
    "PoolStats",
    "SegmentPool",
    "SegmentView",
    "copy_many",
]
