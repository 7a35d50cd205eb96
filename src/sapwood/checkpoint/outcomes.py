"""What becomes of a checkpoint once it is captured: reported, counted, and old ones removed."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping

from sapwood.checkpoint.commit import Commit
from sapwood.checkpoint.engine import Durable, Failed, NoRoom
from sapwood.checkpoint.pruner import Pruner
from sapwood.checkpoint.report import CheckpointStats, SaveReport
from sapwood.runtime.handle import RunHandle
from sapwood.tiers.record import CheckpointId

__all__ = ["OnDurable", "Outcomes"]

log = logging.getLogger(__name__)
_PATIENCE = 10.0
"""Seconds to wait at the end for other ranks."""

OnDurable = Callable[[SaveReport, str], None]


class Outcomes:
    """Hears from the engine how each shard fares, and from the group when a checkpoint is whole."""

    def __init__(
        self,
        run: RunHandle,
        attempt: str,
        stats: CheckpointStats,
        on_durable: OnDurable | None,
        *,
        leads: bool,
    ) -> None:
        """``leads``: this rank watches for its node; the user's callback is rank 0's."""
        self._stats = stats
        self._leads = leads
        self._trace = run.trace
        self._on_durable = on_durable if run.group.rank == 0 else None
        self.pruners: Mapping[str, Pruner] = {}
        """By tier; they hear of each checkpoint that is whole."""
        self.room_makers: Mapping[str, Pruner] = {}
        """By tier; they are asked when there is no room for another."""
        self._unsettled: dict[str, dict[CheckpointId, None]] = {}
        self._lock = threading.Lock()
        self._commit = Commit(run.group, attempt, self._whole, watches=leads)

    def heard(self, progress: Durable | Failed | NoRoom) -> None:
        """A shard of this rank is safe in a tier, or could not be brought there, or has no room."""
        if isinstance(progress, NoRoom):
            maker = self.room_makers.get(progress.tier)
            if maker is not None:
                maker.make_room(progress.id)
            return
        report = self._stats.of(progress.id)
        if report is None:
            return
        if self._leads and getattr(progress, "final", True):
            with self._lock:
                self._unsettled.setdefault(progress.tier, {})[progress.id] = None
        if isinstance(progress, Failed):
            log.warning("checkpoint %s, tier %s: %s", progress.id, progress.tier, progress.message)
            if progress.final:
                report.failed[progress.tier] = progress.message
            return
        report.durable[progress.tier] = progress.seconds
        if self._trace.on:
            now = time.perf_counter_ns()
            start = now - int(progress.seconds * 1e9)
            lane, step = f"ckpt {progress.tier}", progress.id.step
            self._trace.complete("ckpt_tier", start, now, lane=lane, step=step)
        self._commit.durable(progress.id, progress.tier)

    def _whole(self, id: CheckpointId, tier: str) -> None:
        """Every rank's shard is safe in a tier; heard on one rank per node."""
        report = self._stats.of(id)
        if report is None:
            return
        report.whole.add(tier)
        if self._on_durable is not None:
            self._on_durable(report, tier)
        lost = self._settle(id, tier)
        pruner = self.pruners.get(tier)
        if pruner is not None:
            pruner.discard(lost)
            pruner.whole(id, report.created, report.metrics)

    def _settle(self, id: CheckpointId, tier: str) -> list[CheckpointId]:
        """A checkpoint is whole; those before it that are not never will be.

        Every rank's shards come to a tier one after the other: some rank has given up on these.
        """
        with self._lock:
            known = self._unsettled.get(tier, {})
            lost = [other for other in known if other.step < id.step]
            for other in (id, *lost):
                known.pop(other, None)
        return lost

    def close(self, *, meet: bool, timeout: float) -> None:
        """Wait a little for what is still counted; ``meet``: and for all ranks to come here."""
        self._commit.close(min(_PATIENCE, timeout))
        if meet:
            self._commit.meet(min(_PATIENCE, timeout))
