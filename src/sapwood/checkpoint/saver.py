"""Which step is captured when, from the run's events, and handed to the engine."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from sapwood.checkpoint.agreement import Agreement
from sapwood.checkpoint.auto import Pace
from sapwood.checkpoint.branches import Attempt
from sapwood.checkpoint.capture import OWNER, Capture, make_capture
from sapwood.checkpoint.engine import Engine, Job
from sapwood.checkpoint.failures import Failures
from sapwood.checkpoint.pool import StagingPool
from sapwood.checkpoint.report import CheckpointStats, SaveReport
from sapwood.checkpoint.schedule import Schedule
from sapwood.checkpoint.settings import CheckpointSettings
from sapwood.checkpoint.timed import TimedSchedule
from sapwood.checkpoint.turns import Turns
from sapwood.errors import CheckpointError, DeadlineError, SapwoodError, UsageError
from sapwood.events import StepEnded, TensorUpdated
from sapwood.runtime import faults
from sapwood.runtime.handle import RunHandle
from sapwood.runtime.worker import Worker
from sapwood.state.apply import OPTIMIZER_CLASS
from sapwood.state.extras import Extras
from sapwood.state.packed import Packed
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
        attempt: Attempt,
        specs: Sequence[TierSpec],
        extras: Extras,
        metrics: Mapping[str, float],
        stats: CheckpointStats,
        failures: Failures,
        on_captured: Callable[[SaveReport], None] | None,
    ) -> None:
        """``metrics`` is looked at when a step is saved; ``stats`` gets a report of each.

        ``failures`` hears of steps that could not be captured.
        """
        self._run, self._settings = run, settings
        self._engine, self._pool = engine, pool
        self._attempt, self._turns = attempt, Turns(specs)
        self._extras, self._metrics = extras, metrics
        self._stats, self._failures, self._on_captured = stats, failures, on_captured
        self._schedule = _make_schedule(run, settings, f"ckpt/{attempt.name}/due")
        self._agreement = Agreement(run.group, attempt.name)
        self.pace = Pace(settings, speaks=run.group.rank == 0)
        self._worker = Worker("sapwood-capture")
        self._capture: Capture | None = None
        self._capture_step = 0
        self._latest = -1
        self._handed: frozenset[str] = frozenset()  # the tiers the latest was captured for
        self._report: SaveReport | None = None
        self._problem: tuple[int, CheckpointError] | None = None
        self._trusted = False
        self._stuck = False
        self._failure: Exception | None = None
        self._subscriptions = [
            run.events.subscribe(TensorUpdated, self._updated, name=OWNER),
            run.events.subscribe(StepEnded, self._step_ended, name=OWNER),
        ]

    def start(self, attempt: Attempt) -> None:
        """Begin after the step the run is at, whose state may have just been restored.

        What is saved from now on is of ``attempt``: a step that was saved before and comes again
        is another state, and is saved again.
        """
        self._attempt = attempt
        self._agreement = Agreement(self._run.group, attempt.name)
        self._latest = -1
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
            CheckpointError: no staging memory became free in time, copying failed, or something
                failed to give its state, or gave one that cannot be kept.
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
                late = f"earlier checkpoints were not written in {seconds:.3g} s"
                advice = "see the tiers' warnings, or save less often"
                self._not_saved(step, CheckpointError(f"{late}; {advice}"))
            else:
                self._end(capture, step, tiers, again=again)
                self._arm(step + 1)
        self._worker.drain(seconds)
        self._raise_failure()
        failed, error = self._problem or (-1, CheckpointError())
        if failed == step:
            self._failures.told()
            raise error
        report = self._stats.of(CheckpointId(step, self._attempt.name))
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
        elif self._stats.failures_in_a_row:
            last = self._stats.failures[-1]
            log.error("the last checkpoint was not saved: %s", last.reason)

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
        waited = self._run.fence_wait(OWNER)
        self.pace.step_ended(self._report, saved=capture is not None, waited=waited)
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
        self._failures.check()

    def _raise_failure(self) -> None:
        """Raise what must not be ignored, from the background or just now."""
        failure, self._failure = self._failure, None
        if failure is not None:
            self._failures.told()
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
        done: Callable[[Capture], None] = lambda c: self._complete(c, step, plan)  # noqa: E731
        parameters, trace = self._pool.contents.by_parameter, self._run.trace
        capture = make_capture(mode, staging, parameters, done, self._worker, trace)
        capture.on_error = lambda error: self._spoilt(capture, step, error)
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
        """The step's state is complete: copy what is beside tensors, and let the capture end.

        ``again``: it was captured before, for other tiers than these.
        """
        self._handed = self._handed.union(tiers) if again else frozenset(tiers)
        self._latest, self._problem = step, None
        capture.tiers, capture.again = tiers, again
        start = time.perf_counter()
        try:
            metrics = _numbers(self._metrics)
            groups, contents = self._run.optimizer.param_groups, self._pool.contents
            common = self._run.group.rank == 0
            taken = self._extras.take(step, groups, contents.plain, common=common)
        except Exception as error:
            self._abandon(capture)
            self._not_saved(step, error, tiers)
            return
        # Beside the catalog, whose rows other versions read too, and only where there are some.
        kind = type(self._run.optimizer).__name__
        more: dict[str, Any] = {"metrics": plain_metrics(metrics), OPTIMIZER_CLASS: kind}
        more |= {"tied": dict(contents.tied)} if contents.tied else {}
        capture.extras = lambda: _with(taken(), more)
        self._report = capture.report = SaveReport(
            id=CheckpointId(step, self._attempt.name),
            lineage=self._attempt.lineage,
            mode=capture.mode,
            nbytes=0,
            created=time.time(),
            metrics=metrics,
        )
        capture.blocking_seconds += time.perf_counter() - start
        capture.ended()

    def _abandon(self, capture: Capture) -> None:
        """Its bytes are of no use: let held buckets go, and use its staging memory again."""
        capture.abandon()
        self._pool.give_back(capture.staging.number)

    def _spoilt(self, capture: Capture, step: int, cause: Exception) -> None:
        error = CheckpointError(
            f"step {step} is not saved, its tensors could not be copied: "
            f"{type(cause).__name__}: {cause}"
        )
        error.__cause__ = cause
        self._not_saved(step, error, capture.tiers)

    def _not_saved(self, step: int, cause: Exception, tiers: Sequence[str] = ()) -> None:
        """Tell the training, on whichever thread this is found out.

        ``tiers``: those it was captured for in vain.
        """
        if isinstance(cause, CheckpointError) and str(cause).startswith(f"step {step} is not"):
            error = cause
        else:
            known = isinstance(cause, SapwoodError)
            text = str(cause) if known else f"{type(cause).__name__}: {cause}"
            error = CheckpointError(f"step {step} is not saved: {text}")
            error.__cause__ = cause
        self._forget(step, tiers)
        self._problem = step, error
        self._failures.add(step, error)

    def _forget(self, step: int, tiers: Sequence[str]) -> None:
        """It may be tried again, for these tiers; what was captured before for others counts."""
        if self._latest == step:
            self._handed = self._handed.difference(tiers)
            if not self._handed:
                self._latest = -1

    # -- handing over ------------------------------------------------------------------------

    def _complete(self, capture: Capture, step: int, plan: ShardPlan) -> None:
        """All tensors are copied; called on any thread, so errors wait for the next step."""
        good = capture.error is None
        try:
            if good:
                self._agreement.check(plan, step)
        except Exception as error:
            self._not_saved(step, error, capture.tiers)
            self._failure = self._failure or error  # at once: it would be so again, every time
            good = False
        if not good:
            self._forget(step, capture.tiers)
            self._pool.give_back(capture.staging.number)
            return
        self._in_background(lambda: self._hand_over(capture, step, plan))
        syncs = self._settings.engine == "sync" and capture.mode != "lazy"
        if (syncs or capture.mode == "sharded") and not self._worker.is_current():
            # Then the rank waits until the engine has its shard, or until that is durable; what
            # takes too long is reported there.
            with suppress(DeadlineError):
                self._worker.drain(self._settings.drain_timeout)

    def _in_background(self, job: Callable[[], None]) -> None:
        """Do what may take long off the training's thread: encoding what is beside tensors."""
        if not self._worker.is_current():
            try:
                self._worker.submit(job)
                return
            except UsageError:
                log.debug("the last checkpoint is handed over by whoever closes")
        job()

    def _hand_over(self, capture: Capture, step: int, plan: ShardPlan) -> None:
        """Give a complete capture to the engine."""
        assert capture.report is not None
        known = self._stats.of(capture.report.id) if capture.again else None
        report = known or capture.report
        try:
            job = self._job(capture, report, plan)
        except Exception as error:
            self._pool.give_back(capture.staging.number)
            self._not_saved(step, error, capture.tiers)
            return
        report.nbytes, report.tiers = job.nbytes, (*report.tiers, *job.tiers)
        report.preparation_seconds = capture.copy_seconds
        report.blocking_seconds = capture.blocking_seconds
        if known is None:
            self._stats.saves.append(report)
        try:
            self._engine.submit(job)
        except Exception as error:
            self._not_saved(step, error, capture.tiers)
            return
        try:
            if self._on_captured is not None and known is None:
                self._on_captured(report)
        except Exception as error:
            self._failure = self._failure or error

    def _job(self, capture: Capture, report: SaveReport, plan: ShardPlan) -> Job:
        packed, capture.extras = capture.extras(), Packed  # which keeps nothing alive
        rank = self._run.group.rank
        faults.point("checkpoint.extras", step=report.id.step)
        packed.write(capture.staging.arena.write_at, plan.shards[rank].extras_at)
        return Job(
            id=report.id,
            rank=rank,
            arena=capture.staging.number,
            plan=plan,
            created=report.created,
            extras=packed.extras,
            extras_bytes=packed.nbytes,
            tiers=capture.tiers,
            lineage=report.lineage,
        )


def _with(packed: Packed, more: Mapping[str, Any]) -> Packed:
    return replace(packed, extras={**packed.extras, **more})


def _numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Metrics as plain numbers, also those of numpy and tensors of one element.

    Raises:
        CheckpointError: one is no number.
    """
    found: dict[str, float] = {}
    for name, value in metrics.items():
        try:
            found[str(name)] = value if type(value) in (int, float) else float(value)
        except (TypeError, ValueError, RuntimeError) as error:
            raise CheckpointError(
                f"ckpt.metrics[{name!r}] is a {type(value).__name__}, expected a number"
            ) from error
    return found


def _make_schedule(
    run: RunHandle, settings: CheckpointSettings, key: str
) -> Schedule | TimedSchedule:
    if settings.seconds is not None:
        return TimedSchedule(run.group, settings.seconds, key)
    return Schedule(run.group, settings.steps, key, stretches=settings.mode == "auto")
