"""What becomes of a checkpoint once it is captured: reported, counted, and old ones removed."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping

from sapwood.checkpoint.branches import Attempt
from sapwood.checkpoint.commit import Commit
from sapwood.checkpoint.engine import Durable, Failed, NoRoom
from sapwood.checkpoint.failures import Failures
from sapwood.checkpoint.order import Order
from sapwood.checkpoint.pruner import Pruner
from sapwood.checkpoint.report import CheckpointStats, SaveReport
from sapwood.errors import CheckpointError
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
        name: str,
        stats: CheckpointStats,
        failures: Failures,
        on_durable: OnDurable | None,
        *,
        leads: bool,
    ) -> None:
        """``leads``: this rank watches for its node; the user's callback is rank 0's.

        ``name`` is the checkpointer's, the same on all ranks.
        """
        self._stats = stats
        self._failures = failures
        self._leads = leads
        self._trace = run.trace
        self._on_durable = on_durable if run.group.rank == 0 else None
        self.pruners: Mapping[str, Pruner] = {}
        """By tier; they hear of each checkpoint that is whole."""
        self.room_makers: Mapping[str, Pruner] = {}
        """By tier; they are asked when there is no room for another."""
        self.attempt: Attempt | None = None
        """Whose checkpoints are taken now."""
        self._unsettled: dict[str, dict[CheckpointId, None]] = {}
        self._order = Order()
        self._lock = threading.Lock()
        self._commit = Commit(run.group, name, self._whole, watches=leads)

    def heard(self, progress: Durable | Failed | NoRoom) -> None:
        """A shard of this rank is safe in a tier, or could not be brought there, or has no room."""
        if isinstance(progress, NoRoom):
            self._make_room(progress)
            return
        report = self._stats.of(progress.id)
        if report is None:
            return
        if self._leads and getattr(progress, "final", True):
            with self._lock:
                self._order.come(progress.id)
                self._unsettled.setdefault(progress.tier, {})[progress.id] = None
        if isinstance(progress, Failed):
            log.warning("checkpoint %s, tier %s: %s", progress.id, progress.tier, progress.message)
            if progress.final:
                self._failed(report, progress)
            return
        report.durable[progress.tier] = progress.seconds
        if progress.tier != "memory":  # which alone is no safe place, and may be the only one now
            self._failures.saved(progress.id.step)
        if self._trace.on:
            now = time.perf_counter_ns()
            start = now - int(progress.seconds * 1e9)
            lane, step = f"ckpt {progress.tier}", progress.id.step
            self._trace.complete("ckpt_tier", start, now, lane=lane, step=step)
        self._commit.durable(progress.id, progress.tier)

    def _failed(self, report: SaveReport, progress: Failed) -> None:
        before = set(report.failed)
        report.failed[progress.tier] = progress.message
        lasting = set(report.lasting)
        if lasting <= set(report.failed) and not lasting <= before:
            reasons = "; ".join(f"tier {tier}: {report.failed[tier]}" for tier in report.lasting)
            step = progress.id.step
            self._failures.add(step, CheckpointError(f"step {step} is not saved: {reasons}"))

    def _make_room(self, progress: NoRoom) -> None:
        """Let something older of the same training go; of which training it is must be known."""
        maker, id = self.room_makers.get(progress.tier), progress.id
        report, now = self._stats.of(id), self.attempt
        if maker is None:
            return
        if report is not None:
            maker.make_room(id, report.lineage)
        elif now is not None and now.name == id.attempt:  # another rank's shard came first
            maker.make_room(id, now.lineage)

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
            pruner.discard(lost, report.lineage)
            # A report without a comparison is of a run that makes none: nothing to wait for.
            compared = report.compared is not False
            pruner.whole(id, report.created, report.metrics, report.lineage, compared=compared)

    def _settle(self, id: CheckpointId, tier: str) -> list[CheckpointId]:
        """A checkpoint is whole; those before it that are not never will be.

        Every rank's shards come to a tier one after the other: some rank has given up on these.
        """
        with self._lock:
            known = self._unsettled.get(tier, {})
            lost = [other for other in known if self._order.before(other, id)]
            for other in (id, *lost):
                known.pop(other, None)
        return lost

    def close(self, *, meet: bool, timeout: float) -> None:
        """Wait a little for what is still counted; ``meet``: and for all ranks to come here."""
        self._commit.close(min(_PATIENCE, timeout))
        if meet:
            self._commit.meet(min(_PATIENCE, timeout))
