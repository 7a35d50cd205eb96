"""Which step is captured when, from the run's events, and handed to the engine."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sapwood.checkpoint.agreement import Agreement
from sapwood.checkpoint.auto import Pace
from sapwood.checkpoint.capture import OWNER, Capture, make_capture
from sapwood.checkpoint.engine import Engine, Job
from sapwood.checkpoint.pool import StagingPool
from sapwood.checkpoint.report import CheckpointStats, SaveReport
from sapwood.checkpoint.schedule import Schedule
from sapwood.checkpoint.settings import CheckpointSettings
from sapwood.checkpoint.timed import TimedSchedule
from sapwood.checkpoint.turns import Turns
from sapwood.errors import CheckpointError
from sapwood.events import StepEnded, TensorUpdated
from sapwood.runtime.handle import RunHandle
from sapwood.runtime.worker import Worker
from sapwood.state.extras import Extras
from sapwood.state.shards import ShardPlan
from sapwood.tiers.metrics import plain_metrics
from sapwood.tiers.record import CheckpointId
from sapwood.tiers.spec import TierSpec

__all__ = ["Saver"]

log = logging.getLogger(__name__)


class Saver:
    """Captures the steps that are due, and others when asked."""

    def __init__(
        self,
        run: RunHandle,
        settings: CheckpointSettings,
        engine: Engine,
        pool: StagingPool,
        *,
        attempt: str,
        specs: Sequence[TierSpec],
        extras: Extras,
        metrics: Mapping[str, float],
        stats: CheckpointStats,
        on_captured: Callable[[SaveReport], None] | None,
    ) -> None:
        """``metrics`` is looked at when a step is saved; ``stats`` gets a report of each."""
        self._run, self._settings = run, settings
        self._engine, self._pool = engine, pool
        self._attempt, self._turns = attempt, Turns(specs)
        self._extras, self._metrics = extras, metrics
        self._stats, self._on_captured = stats, on_captured
        self._schedule = _make_schedule(run, settings, f"ckpt/{attempt}/due")
        self._agreement = Agreement(run.group, attempt)
        self.pace = Pace(settings, speaks=run.group.rank == 0)
        self._worker = Worker("sapwood-capture")
        self._capture: Capture | None = None
        self._capture_step = 0
        self._latest = -1
        self._handed: frozenset[str] = frozenset()  # the tiers the latest was captured for
        self._trusted = False
        self._stuck = False
        self._failure: Exception | None = None
        self._subscriptions = [
            run.events.subscribe(TensorUpdated, self._updated, name=OWNER),
            run.events.subscribe(StepEnded, self._step_ended, name=OWNER),
        ]

    def start(self) -> None:
        """Begin after the step the run is at, whose state may have just been restored."""
        self._trusted = False
        self._disarm()
        self._turns.start()
        self._schedule.start(self._run.step_count)
        self._arm(self._run.step_count + 1)

    def save(
        self, step: int, timeout: float | None = None, *, everywhere: bool = False
    ) -> SaveReport:
        """Capture the step that has just ended; if it was due, that was done already.

        Waits at most ``timeout`` seconds for staging memory, by default ``drain_timeout``.
        ``everywhere``: for every tier, also those whose turn it is not.

        Raises:
            CheckpointError: no staging memory became free in time, or copying failed.
        """
        seconds = self._settings.drain_timeout if timeout is None else timeout
        self._turns.come(step)
        tiers, again = self._turns.tiers(everywhere=everywhere), step == self._latest
        if again:
            tiers = tuple(tier for tier in tiers if tier not in self._handed)
        if tiers or not again:
            self._disarm()
            capture = self._begin_within(step, seconds)
            if capture is None:
                raise CheckpointError(
                    f"step {step} is not saved: earlier checkpoints were not written in "
                    f"{seconds:.3g} s; see the tiers' warnings, or save less often"
                )
            self._end(capture, step, tiers, again=again)
            self._arm(step + 1)
        self._worker.drain(seconds)
        self._raise_failure()
        report = self._stats.of(CheckpointId(step, self._attempt))
        if report is None:
            raise CheckpointError(f"step {step} was not captured; see the log")
        return report

    def freed(self, number: int) -> None:
        """The engine needs some staging memory no longer."""
        self._stuck = False
        self._pool.give_back(number)

    def drain(self, timeout: float) -> None:
        """Wait until what was begun is captured."""
        self._worker.drain(timeout)

    def close(self, timeout: float) -> None:
        """Finish what is under way; nothing is captured from now on."""
        for subscription in self._subscriptions:
            subscription.cancel()
        if self._capture is not None:
            self._capture.abandon()
        self._schedule.close()
        self._worker.close(timeout)

    def say_failure(self) -> None:
        """At the end there is no next step to raise it in."""
        if self._failure is not None:
            log.error("the last checkpoint was not saved: %s", self._failure)

    # -- events ------------------------------------------------------------------------------

    def _updated(self, event: TensorUpdated) -> None:
        capture = self._capture
        if capture is not None and event.step == self._capture_step:
            try:
                capture.updated(event)
            except Exception as error:
                capture.fail(error)

    def _step_ended(self, event: StepEnded) -> None:
        capture, self._capture = self._capture, None
        latest = self._stats.saves[-1] if self._stats.saves else None
        waited = self._run.fence_wait(OWNER)
        self.pace.step_ended(latest, saved=capture is not None, waited=waited)
        if self._schedule.due == event.step:
            self._turns.come(event.step)
        if capture is not None and self._capture_step == event.step:
            self._finish(capture, event.step)
        elif self._schedule.due == event.step:
            self._save_late(event.step)
        self._schedule.step_ended(event.step)
        self._arm(event.step + 1)
        self._worker.check()
        self._raise_failure()

    def _raise_failure(self) -> None:
        """Raise what went wrong since the last time, in the background or just now."""
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    # -- one checkpoint ----------------------------------------------------------------------

    def _arm(self, step: int) -> None:
        """Get ready to capture ``step``, if it is due."""
        if self._schedule.due == step:
            self._capture_step = step
            # What was right at the last checkpoint is taken to be right; its end looks again.
            self._capture = self._begin(step, self.pace.mode, trusting=self._trusted)

    def _disarm(self) -> None:
        """Give the staging memory back that waits for a step to come."""
        capture, self._capture = self._capture, None
        if capture is not None:
            self._abandon(capture)

    def _begin(self, step: int, mode: str, *, trusting: bool = False) -> Capture | None:
        """A capture into free staging memory; None if there is none."""
        if not trusting:
            self._pool.follow()
        staging = self._pool.take()
        if staging is None:
            return None
        plan = self._pool.plan  # by the time it is complete, the run may have another
        done: Callable[[Capture], None] = lambda c: self._captured(c, step, plan)  # noqa: E731
        parameters, trace = self._pool.contents.by_parameter, self._run.trace
        capture = make_capture(mode, staging, parameters, done, self._worker, trace)
        capture.on_error = lambda error: self._spoilt(step, error)
        return capture

    def _begin_within(self, step: int, seconds: float) -> Capture | None:
        deadline = time.monotonic() + seconds
        while (capture := self._begin(step, "sharded")) is None:
            if time.monotonic() > deadline:
                return None
            time.sleep(0.001)
        return capture

    def _finish(self, capture: Capture, step: int) -> None:
        if not self._pool.contents.current():
            # Tensors were replaced or appeared (an optimizer's state in its first step).
            self._abandon(capture)
            fresh = self._begin(step, "sharded")
            if fresh is None:
                self._save_late(step)
                return
            capture = fresh
        self._trusted = True
        self._schedule.saved(step, at_least=self.pace.interval())
        self._end(capture, step, self._turns.tiers())

    def _save_late(self, step: int) -> None:
        """No staging memory was free when the step began: wait for some, but not for ever."""
        # Once is enough: a tier, or an engine, that is stuck must not slow every step down.
        capture = self._begin_within(step, 0.0 if self._stuck else self._settings.patience)
        if capture is not None:
            self._finish(capture, step)
            return
        self._stuck = True
        self._stats.skipped.append(step)
        log.warning(
            "step %d is not saved: earlier checkpoints have not been written for %g s; see the "
            "tiers' warnings, or save less often",
            step,
            self._settings.patience,
        )
        self._schedule.saved(step)

    def _end(
        self, capture: Capture, step: int, tiers: tuple[str, ...], *, again: bool = False
    ) -> None:
        """The step's state is complete: take what is small at once, and let the capture end.

        ``again``: it was captured before, for other tiers than these.
        """
        self._handed = self._handed.union(tiers) if again else frozenset(tiers)
        self._latest = step
        capture.tiers, capture.again = tiers, again
        start = time.perf_counter()
        try:
            capture.metrics = dict(self._metrics)
            groups = self._run.optimizer.param_groups
            contents = self._pool.contents
            taken, tied = self._extras.take(step, groups, contents.plain), dict(contents.tied)
            # Beside the catalog, whose rows other versions read too, and only where there are some.
            capture.extras = (lambda: {**taken(), "tied": tied}) if tied else taken
        except Exception:
            self._abandon(capture)
            raise
        capture.blocking_seconds += time.perf_counter() - start
        capture.ended()

    def _abandon(self, capture: Capture) -> None:
        """Its bytes are of no use: let held buckets go, and use its staging memory again."""
        capture.abandon()
        self._pool.give_back(capture.staging.number)

    def _spoilt(self, step: int, cause: Exception) -> None:
        error = CheckpointError(
            f"step {step} is not saved, its tensors could not be copied: "
            f"{type(cause).__name__}: {cause}"
        )
        error.__cause__ = cause
        self._failure = self._failure or error

    # -- handing over ------------------------------------------------------------------------

    def _captured(self, capture: Capture, step: int, plan: ShardPlan) -> None:
        """Hand a complete capture over; called on any thread, so errors wait for the next step."""
        job: Job | None = None
        if capture.error is None:
            try:
                self._agreement.check(plan, step)
                job = self._job(capture, step, plan)
            except Exception as error:
                self._failure = self._failure or error
        if job is None:
            self._latest = -1  # it may be tried again
            self._pool.give_back(capture.staging.number)
            return
        known = self._stats.of(job.id) if capture.again else None
        report = known or SaveReport(
            id=job.id,
            mode=capture.mode,
            nbytes=capture.staging.arena.nbytes,
            created=job.created,
            metrics=capture.metrics,
        )
        report.preparation_seconds = capture.copy_seconds
        report.blocking_seconds = capture.blocking_seconds
        if known is None:
            self._stats.saves.append(report)
        try:
            self._engine.submit(job)
            if self._on_captured is not None and known is None:
                self._on_captured(report)
        except Exception as error:
            self._failure = self._failure or error

    def _job(self, capture: Capture, step: int, plan: ShardPlan) -> Job:
        extras: dict[str, Any] = {**capture.extras(), "metrics": plain_metrics(capture.metrics)}
        return Job(
            id=CheckpointId(step, self._attempt),
            rank=self._run.group.rank,
            arena=capture.staging.number,
            plan=plan,
            created=time.time(),
            extras=extras,
            tiers=capture.tiers,
        )


def _make_schedule(
    run: RunHandle, settings: CheckpointSettings, key: str
) -> Schedule | TimedSchedule:
    if settings.seconds is not None:
        return TimedSchedule(run.group, settings.seconds, key)
    return Schedule(run.group, settings.steps, key, stretches=settings.mode == "auto")
