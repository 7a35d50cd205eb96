"""Removing old checkpoints, tier by tier, once a newer one is whole there.

What runs that were killed in mid-save left unfinished goes as well, if it is of another attempt, of
no later step than the newest whole checkpoint of this one, and was not touched for an hour: two
runs may be writing to one place, and what either still writes to is not for the other to judge.
``tiers.leftovers`` has the rule in full.

A tier that is full is the exception: nothing newer can become whole there, so what the next one
would replace goes before it, down to the newest that is whole.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing, suppress

from sapwood.checkpoint.retention import Policy, Saved, any_of, last, to_drop
from sapwood.errors import SapwoodError
from sapwood.tiers.base import Pinning, Stored, Tier, open_checked
from sapwood.tiers.identity import root_of
from sapwood.tiers.leftovers import QUIET_SECONDS, Clearable, Stale
from sapwood.tiers.metrics import metrics_of
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
        policy: Policy | None,
        drop: Callable[[CheckpointId, str], None],
        *,
        quiet: float = QUIET_SECONDS,
    ) -> None:
        """``drop`` removes a checkpoint from the tier of that name, in the background.

        Without a ``policy`` all that are whole stay. What is unfinished and has not changed for
        ``quiet`` seconds counts as left by the dead.
        """
        self._tier = tier
        self._policy = policy
        self._drop = drop
        self._quiet = quiet
        self._cleared = -math.inf
        self._saved: dict[CheckpointId, Saved] | None = None
        self._root = ""
        self._strange: set[CheckpointId] = set()  # those that were named
        self._whole: set[CheckpointId] = set()  # those of which it is certain
        self._compared: CheckpointId | None = None  # the newest whose replicas were equal
        self._compared_for = ""  # in which attempt, or before which
        self._lock = threading.RLock()  # room is wanted on another thread than wholes are told

    def whole(
        self,
        id: CheckpointId,
        created: float,
        metrics: dict[str, float],
        lineage: Lineage | None = None,
        *,
        compared: bool = True,
    ) -> None:
        """A new checkpoint is whole in the tier: what is no longer needed can go.

        Unless its replicas were ``compared`` it may mix two models: then the newest before it that
        does not stays, however many are to be kept.
        """
        with self._lock:
            self._whole.add(id)
            if self._policy is not None:
                if self._saved is None or self._root != root_of(lineage):
                    self._root = root_of(lineage)
                    self._saved = self._ours(id, lineage)
                self._note_compared(id, lineage, compared=compared)
                self._saved[id] = Saved(id=id, created=created, metrics=metrics, lineage=lineage)
                for gone in self._going(self._saved.values(), id, self._policy):
                    self._let_go(gone)
        self._clear(id)

    def _note_compared(self, id: CheckpointId, lineage: Lineage | None, *, compared: bool) -> None:
        if compared:
            self._compared = id
        elif self._compared_for != id.attempt:
            # What all ranks of this attempt were restored from was equal; else the newest before.
            known, parent = self._saved or {}, None if lineage is None else lineage.parent
            older = [other for other in known if other.step < id.step]
            self._compared = parent if parent in known else max(older, default=id)
        self._compared_for = id.attempt

    def make_room(self, id: CheckpointId, lineage: Lineage | None = None) -> None:
        """There is no room for a checkpoint: the oldest of those goes that it would replace.

        Never the newest of its branch that is known to be whole, which may be all there is for a
        while, and nothing of another training.
        """
        if self._policy is None:
            return
        with self._lock:
            # Not what was known: whoever else is short of room may have removed some.
            ours = self._ours(id, lineage).values()
            saved = [s for s in ours if s.id in self._whole and s.id != id]
            coming = Saved(id=id, created=time.time(), lineage=lineage)
            keep = any_of(self._policy, last(2))  # the one to come, and the newest before it
            for gone in self._going([*saved, coming], id, keep)[:1]:
                name = self._tier.name
                log.warning("tier %s has no room for %s: %s goes at once", name, id, gone)
                self._let_go(gone)

    def discard(self, ids: Sequence[CheckpointId], lineage: Lineage | None = None) -> None:
        """Remove checkpoints that nobody has heard of as whole, unless all their shards are there.

        A newer one of ``lineage`` is whole, so that nobody writes to them any more. This training
        began them: those that cannot be read are its own.
        """
        if not ids:
            return
        with self._lock:
            ranks = self._ranks()
            strange = [id for id in ids if not self._discard(id, ranks.get(id, ()), lineage)]
            self._say_strange(strange)

    def _discard(self, id: CheckpointId, ranks: Sequence[int], lineage: Lineage | None) -> bool:
        """False if another training's checkpoint is there, which stays."""
        saved, complete = Saved(id=id, created=0.0, lineage=lineage), bool(ranks)
        if ranks:
            with suppress(SapwoodError):  # damaged: old, and without a merit of its own
                saved, complete = self._read(id, ranks)
        if root_of(saved.lineage) != root_of(lineage):
            return False
        if not complete or id not in self._whole:
            self._let_go(id)
        elif self._saved is not None and self._root == root_of(lineage):
            self._saved[id] = saved
        return True

    def _going(
        self, saved: Iterable[Saved], id: CheckpointId, policy: Policy
    ) -> list[CheckpointId]:
        """What need not be kept once ``id`` is whole, oldest first."""
        # Of an attempt that got further before it was restored from an older step, nothing newer
        # than this is touched: it is not ours to judge.
        going = to_drop([s for s in saved if s.id.step <= id.step], policy, id.attempt)
        kept = {self._compared} | (self._pinned() if going else set())
        return [one for one in going if one not in kept]

    def _pinned(self) -> set[CheckpointId]:
        """What somebody wants kept, whatever the policy says."""
        if not isinstance(self._tier, Pinning):
            return set()
        try:
            return self._tier.pinned()
        except SapwoodError as error:
            # Nothing that might be pinned may go: the tier refuses to remove those that are.
            log.warning("tier %s does not say what is to stay: %s", self._tier.name, error)
            return set()

    def _let_go(self, id: CheckpointId) -> None:
        self._whole.discard(id)
        if self._saved is not None:
            self._saved.pop(id, None)
        self._drop(id, self._tier.name)

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
        self._say_strange([one for one in (*damaged, *(s.id for s in found)) if one not in ours])
        return ours

    def _say_strange(self, found: Iterable[CheckpointId]) -> None:
        """Name what is left alone, each once."""
        strange = sorted(set(found) - self._strange)
        if not strange:
            return
        self._strange.update(strange)
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
        found: list[Saved] = []
        damaged: list[CheckpointId] = []
        for id, there in self._ranks().items():
            try:
                saved, complete = self._read(id, there)
            except SapwoodError:
                damaged.append(id)
                self._whole.discard(id)  # nothing sound may go for the sake of it
                continue
            if complete:  # what is known not to be whole must not take a whole one's place
                found.append(saved)
        return found, damaged

    def _ranks(self) -> dict[CheckpointId, list[int]]:
        """Whose shards are there."""
        ranks: dict[CheckpointId, list[int]] = {}
        try:
            for stored in self._tier.shards():
                ranks.setdefault(stored.id, []).append(stored.rank)
        except SapwoodError as error:
            log.warning("tier %s cannot be listed: %s", self._tier.name, error)
        return ranks

    def _read(self, id: CheckpointId, ranks: Sequence[int]) -> tuple[Saved, bool]:
        """What a checkpoint's record says, and whether it may be whole.

        Raises:
            SapwoodError: it is damaged, or lies where it does not belong.
        """
        with closing(open_checked(self._tier, Stored(id, ranks[0]))) as shard:
            record = shard.record
        all_there = len(ranks) >= record.world
        if all_there:
            self._whole.add(id)
        saved = Saved(
            id=id,
            created=record.created,
            metrics=metrics_of(record.extras),
            lineage=record.lineage,
        )
        return saved, all_there or self._tier.name not in SHARED
