"""Which ranks share a node: the same host, unless ``SAPWOOD_NODE`` gives them another name."""

from __future__ import annotations

import os
import platform

from sapwood.runtime.group import Group
from sapwood.tiers.spec import NodeMap

__all__ = ["NODE", "find_nodes"]

NODE = "SAPWOOD_NODE"


def find_nodes(group: Group) -> NodeMap:
    """Ask all ranks for their node."""
    mine = os.environ.get(NODE) or platform.node() or "node"
    return NodeMap(node=mine, rank_nodes=tuple(group.gather_text("node", mine)))
