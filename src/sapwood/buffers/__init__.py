"""Staging memory that another process can take over."""

from sapwood.buffers.arena import Arena

__all__ = ["Arena"]
