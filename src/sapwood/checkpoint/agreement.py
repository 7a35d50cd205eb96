"""Noticing before anything is written that ranks are about to save different tensors.

Shards are cut from the catalog, so ranks with different catalogs would write a checkpoint that fits
none of them. They compare through the group's store, at the first checkpoint of a plan only: the
first rank to come leaves a digest of its catalog, the others look at it, and nobody waits.
"""

from __future__ import annotations

import hashlib
import json
import logging

from sapwood.errors import CheckpointError, SapwoodError
from sapwood.runtime.group import Group
from sapwood.state.catalog import Catalog, differences
from sapwood.state.shards import ShardPlan

__all__ = ["Agreement"]

log = logging.getLogger(__name__)
_PATIENCE = 10.0
_SHOWN = 8


class Agreement:
    """Sees that the plans of all ranks are of the same tensors."""

    def __init__(self, group: Group, attempt: str) -> None:
        """Nothing is compared yet."""
        self._group = group
        self._prefix = f"ckpt/{attempt}/catalog"
        self._known: ShardPlan | None = None

    def check(self, plan: ShardPlan, step: int) -> None:
        """Compare the plan by which ``step`` is saved, unless it was compared before.

        Raises:
            CheckpointError: another rank saves other tensors; all differences are listed.
        """
        if self._group.world == 1 or plan is self._known:
            return
        text = json.dumps(plan.catalog.to_json())
        try:
            problem = self._compare(f"{self._prefix}/{step}", text, plan.catalog)
        except (SapwoodError, RuntimeError) as error:
            log.info("the tensors of step %d are not compared, the group is gone: %s", step, error)
            return
        if problem:
            raise CheckpointError(f"step {step} is not saved: {problem}")
        self._known = plan

    def _compare(self, key: str, text: str, mine: Catalog) -> str:
        """What is wrong, if something is."""
        store, rank = self._group.store, self._group.rank
        digest = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
        first = store.compare_set(key, "", f"{rank} {digest}").decode()
        other, their_digest = first.split()
        if int(other) == rank:
            # Only one rank leaves it whole, and it is read only if something is wrong.
            store.set(f"{key}/whole", text)
            return ""
        if their_digest == digest:
            return ""
        lines: list[str] = []
        if store.wait(f"{key}/whole", _PATIENCE):
            lines = _told(json.loads(store.get(f"{key}/whole")), mine, int(other), rank)
        return (
            f"rank {rank} has other tensors than rank {other}, and all ranks must have the same "
            "model and optimizer state: " + ("; ".join(lines) or "they are in another order")
        )


def _told(theirs: object, mine: Catalog, other: int, rank: int) -> list[str]:
    lines = [
        line.replace("only in the checkpoint", f"only on rank {other}")
        .replace("missing in the checkpoint", f"only on rank {rank}")
        .replace("in the checkpoint", f"on rank {other}")
        .replace(" here", f" on rank {rank}")
        for line in differences(Catalog.from_json(theirs), mine.by_key)
    ]
    more = len(lines) - _SHOWN
    return lines[:_SHOWN] + ([f"and {more} more"] if more > 0 else [])
