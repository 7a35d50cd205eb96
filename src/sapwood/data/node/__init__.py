"""One process of a host reads, and the others get their records through shared memory.

The memory has no name: its descriptors are passed over a socket, which has one that the system
forgets with the process. So nothing is left behind, whoever is killed.
"""

from __future__ import annotations

from sapwood.data.node.place import Node
from sapwood.data.node.shared import Shared

__all__ = ["Node", "Shared"]
