"""The versions around one: what it comes from, what comes from it, and what was removed of both."""

from __future__ import annotations

from collections import deque
from typing import Any

from sapwood.errors import ModelNotFound
from sapwood.report.store.plain import brief, number, short
from sapwood.repository.base import ModelRecord
from sapwood.store import Repository

__all__ = ["NODES", "around"]

NODES = 150
"""So many versions are shown at once; the nearest ones."""
_METRICS = 2


def around(repo: Repository, record: ModelRecord, limit: int = NODES) -> dict[str, Any]:
    """The versions nearest to one in its tree, newest first, each with its parent."""
    found = {record.id: record}
    todo = deque([record])
    truncated = False
    while todo:
        one = todo.popleft()
        for near in _neighbours(repo, one):
            if near.id in found:
                continue
            if len(found) >= limit:
                truncated = True
                break
            found[near.id] = near
            todo.append(near)
    order = sorted(found.values(), key=lambda one: one.id, reverse=True)
    return {
        "id": str(record.id),
        "truncated": truncated,
        "nodes": [_node(one, found) for one in order],
    }


def _neighbours(repo: Repository, record: ModelRecord) -> list[ModelRecord]:
    parents = []
    if record.parent is not None:
        try:
            parents = [repo.by_id(record.parent, record.parent_name or "")]
        except ModelNotFound:
            parents = []  # where it was kept is gone; the rest of the tree is not
    return parents + repo.children_of(record.id)


def _node(record: ModelRecord, shown: dict[int, ModelRecord]) -> dict[str, Any]:
    metrics = sorted(record.metrics.items())[:_METRICS]
    return {
        **brief(record),
        "parent": str(record.parent) if record.parent in shown else None,
        "more_above": record.parent is not None and record.parent not in shown,
        "metrics": [[short(key, 40), number(value)] for key, value in metrics],
    }
