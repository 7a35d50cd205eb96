"""Engines by name."""

from __future__ import annotations

from sapwood.sync.base import Context, Synchroniser
from sapwood.sync.ddp import Ddp
from sapwood.sync.layerwise import Layerwise

__all__ = ["make_engine"]


def make_engine(context: Context) -> Synchroniser:
    """The engine the settings name; alone, DDP has nothing to do and layerwise serves."""
    if context.settings.engine == "ddp" and context.group.world > 1:
        return Ddp(context)
    return Layerwise(context)
