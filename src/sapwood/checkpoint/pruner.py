"""Removing old checkpoints, tier by tier, once a newer one is whole there.

What runs that were killed in mid-save left unfinished goes as well, if it is of another attempt, of
no later step than the newest whole checkpoint of this one, and was not touched for an hour: two
runs may be writing to one place, and what either still writes to is not for the other to judge.
``tiers.leftovers`` has the rule in full.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from contextlib import closing

from sapwood.checkpoint.retention import Policy, Saved, to_drop
from sapwood.errors import SapwoodError
from sapwood.tiers.base import Stored, Tier, open_checked
from sapwood.tiers.identity import root_of
from sapwood.tiers.leftovers import QUIET_SECONDS, Clearable, Stale
from sapwood.tiers.record import CheckpointId, Lineage
from sapwood.tiers.spec import SHARED

__all__ = ["Pruner"]

log = logging.getLogger(__name__)
_SHOWN = 8


class Pruner:
    """Applies a policy to one tier, also to what earlier attempts of the training left there.

    Checkpoints of other trainings in the same place are not touched.
    """

    def __init__(
        self,
        tier: Tier,
        policy: Policy,
        drop: Callable[[CheckpointId, str], None],
        *,
        quiet: float = QUIET_SECONDS,
    ) -> None:
        """``drop`` removes a checkpoint from the tier of that name, in the background.

        What is unfinished and has not changed for ``quiet`` seconds counts as left by the dead.
        """
        self._tier = tier
        self._policy = policy
        self._drop = drop
        self._quiet = quiet
        self._cleared = -math.inf
        self._saved: dict[CheckpointId, Saved] | None = None
        self._root = ""

    def whole(
        self,
        id: CheckpointId,
        created: float,
        metrics: dict[str, float],
        lineage: Lineage | None = None,
    ) -> None:
        """A new checkpoint is whole in the tier: what is no longer needed can go."""
        if self._saved is None or self._root != root_of(lineage):
            self._root = root_of(lineage)
            self._saved = self._ours(id, lineage)
        self._saved[id] = Saved(id=id, created=created, metrics=metrics, lineage=lineage)
        # Of an attempt that got further before it was restored from an older step, nothing newer
        # than this is touched: it is not ours to judge.
        older = [s for s in self._saved.values() if s.id.step <= id.step]
        for gone in to_drop(older, self._policy, id.attempt):
            del self._saved[gone]
            self._drop(gone, self._tier.name)
        self._clear(id)

    def _clear(self, id: CheckpointId) -> None:
        """Clear up after the dead; now and then, because it looks at every checkpoint's files."""
        now = time.monotonic()
        if not isinstance(self._tier, Clearable) or now - self._cleared < self._quiet:
            return
        self._cleared = now
        try:
            stale = Stale(attempt=id.attempt, step=id.step, quiet=self._quiet)
            for cleared in self._tier.clear(stale):
                log.info("tier %s: what was unfinished of %s is gone", self._tier.name, cleared)
        except SapwoodError as error:
            log.warning("tier %s was not cleared up: %s", self._tier.name, error)

    def _ours(self, id: CheckpointId, lineage: Lineage | None) -> dict[CheckpointId, Saved]:
        """What is there of the training that saved ``id``; of others it is said that they are."""
        found, damaged = self._look()
        known = {one.id.attempt: one.lineage for one in found} | {id.attempt: lineage}
        # Damaged ones are old, without a merit of their own, and ours if their attempt is.
        found += [
            Saved(id=one, created=0.0, lineage=known[one.attempt])
            for one in damaged
            if one.attempt in known
        ]
        ours = {one.id: one for one in found if root_of(one.lineage) == root_of(lineage)}
        strange = [one for one in (*damaged, *(s.id for s in found)) if one not in ours]
        if strange:
            self._say_strange(sorted(set(strange)))
        return ours

    def _say_strange(self, strange: Sequence[CheckpointId]) -> None:
        more = f" and {len(strange) - _SHOWN} more" if len(strange) > _SHOWN else ""
        log.warning(
            "tier %s: %s%s are of another training, or cannot be read; they are left alone, "
            "whatever is to be kept. Give each training a place of its own, and remove these "
            "folders by hand if nobody needs them",
            self._tier.name,
            ", ".join(str(one) for one in strange[:_SHOWN]),
            more,
        )

    def _look(self) -> tuple[list[Saved], list[CheckpointId]]:
        """What is there and may be whole, and what is damaged."""
        ranks: dict[CheckpointId, list[int]] = {}
        try:
            for stored in self._tier.shards():
                ranks.setdefault(stored.id, []).append(stored.rank)
        except SapwoodError as error:
            log.warning("tier %s cannot be listed: %s", self._tier.name, error)
        found: list[Saved] = []
        damaged: list[CheckpointId] = []
        for id, there in ranks.items():
            try:
                with closing(open_checked(self._tier, Stored(id, there[0]))) as shard:
                    record = shard.record
            except SapwoodError:
                damaged.append(id)
                continue
            # What is known not to be whole must not take a whole one's place.
            if self._tier.name not in SHARED or len(there) >= record.world:
                found.append(
                    Saved(
                        id=id,
                        created=record.created,
                        metrics=record.extras.get("metrics", {}),
                        lineage=record.lineage,
                    )
                )
        return found, damaged
