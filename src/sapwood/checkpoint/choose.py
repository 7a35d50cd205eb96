"""Choosing tiers for users who do not: memory, a fast disk of the node, the place itself."""

from __future__ import annotations

import hashlib
import logging
import os
from pathlib import Path

from sapwood.errors import TierError
from sapwood.runtime.group import Group
from sapwood.tiers.probe import best_local, look_at, usual_places
from sapwood.tiers.spec import NodeMap

__all__ = ["choose_tiers"]

log = logging.getLogger(__name__)


def choose_tiers(group: Group, nodes: NodeMap, place: str | Path, need: int) -> tuple[str, ...]:
    """Names of tiers, the same kinds on every node; each node may use a disk of another name.

    The lowest rank of each node looks at its storage; ``need`` is what a node must hold, in bytes.
    """
    if str(place).startswith("s3://"):
        return ("memory", "s3")
    leader = nodes.ranks[0]
    mine = _look(Path(place), need) if group.rank == leader else ""
    found = group.gather_text("storage", mine)
    leaders = [nodes.rank_nodes.index(node) for node in nodes.nodes]
    if not all(found[rank] for rank in leaders):
        return ("memory", "external")
    log.info("checkpoints rest first on %s", found[leader])
    return ("memory", f"local:{found[leader]}", "external")


def _look(place: Path, need: int) -> str:
    try:
        home = look_at(place)
    except TierError as error:
        log.warning("%s", error)
        return ""
    best = best_local(home, usual_places(), need=need)
    if best is None:
        return ""
    mark = hashlib.blake2b(str(place.resolve()).encode(), digest_size=6).hexdigest()
    return str(best.folder / f"sapwood-{os.getuid()}" / mark)
