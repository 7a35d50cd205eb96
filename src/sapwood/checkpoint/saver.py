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
from sapwood.checkpoint.given import numbers
from sapwood.checkpoint.pool import StagingPool
from sapwood.checkpoint.replicas import Comparison
from sapwood.checkpoint.report import CheckpointStats, SaveReport
from sapwood.checkpoint.schedule import Schedule
from sapwood.checkpoint.settings import CheckpointSettings
from sapwood.checkpoint.timed import TimedSchedule
from sapwood.checkpoint.turns import Turns
from sapwood.checkpoint.witness import Parts
from sapwood.errors import (
    CheckpointError,
    DeadlineError,
    ReplicasDiffer,
    SapwoodError,
    UsageError,
)
from sapwood.events import StepEnded, TensorUpdated
from sapwood.runtime import faults
from sapwood.runtime.handle import RunHandle
from sapwood.runtime.worker import Worker
from sapwood.state.extras import Extras
from sapwood.state.kinds import Kinds
from sapwood.state.optimizers import check_own_state
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
        comparison: Comparison | None,
        on_captured: Callable[[SaveReport], None] | None,
    ) -> None:
        """``metrics`` is looked at when a step is saved; ``stats`` gets a report of each.

        ``failures`` hears of steps that could not be captured. With a ``comparison``, no shard is
        handed over before it was compared.
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
        self._comparison = comparison
        # Its own thread: it waits for other ranks, and copies must not wait behind it.
        self._comparing = Worker("sapwood-replicas") if comparison is not None else self._worker
        self._rounds = (-1, 0)  # of which step, and how often it was come to
        self._act_at = 0
        self._withheld_until = -1  # before step 0, which can be saved as well
        self._capture: Capture | None = None
        self._capture_step = 0
        self._latest = -1
        self._handed: frozenset[str] = frozenset()  # the tiers the latest was captured for
        self._report: SaveReport | None = None
        self._problem: tuple[int, CheckpointError] | None = None
        self._trusted = False
        self._stuck: float | None = None  # since when no staging memory has become free
        self._failure: Exception | None = None
        self._told_of_replicas = False
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
        self._failure, self._rounds = None, (-1, 0)
        self._act_at, self._withheld_until = 0, -1
        self._trusted = self._told_of_replicas = False
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
        round = self._come(step)
        if step == self._latest:
            self.drain(seconds)  # what was captured may yet turn out not to be saved
        tiers, again = self._turns.tiers(everywhere=everywhere), step == self._latest
        if again:
            tiers = tuple(tier for tier in tiers if tier not in self._handed)
        if tiers or not again:
            self._disarm()
            try:
                capture = self._begin_within(step, seconds)
                if capture is None:
                    late = f"earlier checkpoints were not written in {seconds:.3g} s"
                    advice = "see the tiers' warnings, or save less often"
                    raise CheckpointError(f"{late}; {advice}")
            except Exception as cause:
                self._absent(step, round)
                self._not_saved(step, cause)
            else:
                self._end(capture, step, tiers, again=again, round=round)
            self._arm(step + 1)
        else:
            self._absent(step, round)
        self.drain(seconds)
        self._raise_failure()
        failed, error = self._problem or (-1, CheckpointError())
        if failed == step:
            self._failures.told()
            raise error
        report = self._stats.of(CheckpointId(step, self._attempt.name))
        if report is None:
            raise CheckpointError(f"step {step} was not captured; see the log")
        return report

    def say_what_came_late(self, report: SaveReport) -> None:
        """A step is captured once: what was set since then is in no checkpoint of it."""
        if self._run.group.rank != 0:
            return  # rank 0's are those that are looked at
        kept, now = plain_metrics(report.metrics), plain_metrics(self._metrics)
        late = {name: value for name, value in now.items() if kept.get(name) != value}
        if late:
            log.warning(
                "step %d was saved before, with the metrics %s: %s came too late and is not in its "
                "checkpoint. With every= a step that is due is saved inside run.step(); leave it "
                "out and call save() after an evaluation",
                report.id.step,
                kept,
                late,
            )

    def freed(self, number: int) -> None:
        """The engine needs some staging memory no longer."""
        self._stuck = None
        self._pool.give_back(number)

    def drain(self, timeout: float) -> None:
        """Wait until what was begun is captured, compared and handed over."""
        deadline = time.monotonic() + timeout
        self._worker.drain(timeout)
        self._comparing.drain(max(0.0, deadline - time.monotonic()))

    def close(self, timeout: float) -> None:
        """Finish what is under way; nothing is captured from now on."""
        for subscription in self._subscriptions:
            subscription.cancel()
        if self._capture is not None:
            self._capture.abandon()
        self._schedule.close()
        deadline = time.monotonic() + timeout
        self._worker.close(timeout)
        if self._comparison is not None:
            left = max(0.0, deadline - time.monotonic())
            self._comparison.hurry(left)
            self._comparing.close(left)

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
            self._come(event.step)
        try:
            if capture is not None and self._capture_step == event.step:
                self._finish(capture, event.step)
            elif self._schedule.due == event.step:
                self._save_late(event.step)
        except Exception as error:
            self._not_begun(event.step, error)
        self._schedule.step_ended(event.step)
        self._arm(event.step + 1)
        self._worker.check()
        self._comparing.check()
        if event.step >= self._act_at:
            self._raise_failure()
            self._failures.check()

    def check(self) -> None:
        """Raise what must not be ignored, from the background, between steps."""
        self._raise_failure()

    def check_at_close(self) -> None:
        """The same for the last time: replicas that differ are no news to who was told before."""
        if self._told_of_replicas and isinstance(self._failure, ReplicasDiffer):
            self._failure = None
        self._raise_failure()

    def _raise_failure(self) -> None:
        """Raise what must not be ignored, from the background or just now."""
        self._act_at = 0
        failure, self._failure = self._failure, None
        if failure is not None:
            self._failures.told()
            self._told_of_replicas |= isinstance(failure, ReplicasDiffer)
            raise failure

    # -- one checkpoint ----------------------------------------------------------------------

    def _arm(self, step: int) -> None:
        """Get ready to capture ``step``, if it is due."""
        if self._schedule.due == step:
            self._capture_step = step
            # What was right at the last checkpoint is taken to be right; its end looks again.
            turn = self._turns.count + 1
            try:
                self._capture = self._begin(step, self.pace.mode, turn, trusting=self._trusted)
            except Exception as error:
                log.info("step %d cannot be captured as it comes, its end tries: %s", step, error)

    def _disarm(self) -> None:
        """Give the staging memory back that waits for a step to come."""
        capture, self._capture = self._capture, None
        if capture is not None:
            self._abandon(capture)

    def _begin(self, step: int, mode: str, turn: int, *, trusting: bool = False) -> Capture | None:
        """A capture into free staging memory; None if there is none.

        ``turn``: how many checkpoints were due before, which says whose shard is looked at.
        """
        if not trusting:
            self._pool.follow()
        staging = self._pool.take()
        if staging is None:
            return None
        # By the time it is complete, the run may have others.
        plan, parts = self._pool.plan, self._pool.parts
        done: Callable[[Capture], None] = lambda c: self._complete(c, step, plan, parts)  # noqa: E731
        parameters, trace = self._pool.contents.by_parameter, self._run.trace
        capture = make_capture(mode, staging, parameters, done, self._worker, trace)
        capture.on_error = lambda error: self._spoilt(capture, step, error)
        if self._comparison is not None:
            capture.witness = parts.witness(self._run.group.rank, turn)
        return capture

    def _begin_within(self, step: int, seconds: float) -> Capture | None:
        deadline = time.monotonic() + seconds
        while (capture := self._begin(step, "sharded", self._turns.count)) is None:
            if time.monotonic() > deadline:
                return None
            time.sleep(0.001)
        return capture

    def _finish(self, capture: Capture, step: int) -> None:
        if not self._pool.contents.current():
            # Tensors were replaced or appeared (an optimizer's state in its first step).
            self._abandon(capture)
            fresh = self._begin(step, "sharded", self._turns.count)
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
        start = time.monotonic()
        patience = self._settings.patience if self._stuck is None else 0.0
        capture = self._begin_within(step, patience)
        if capture is not None:
            self._finish(capture, step)
            return
        # Read once: the engine's thread forgets it when memory becomes free, at any moment.
        since = self._stuck
        self._stuck = since = start if since is None else since
        self._absent(step, 0)
        self._stats.skipped.append(step)
        waited = time.monotonic() - since
        error = CheckpointError(
            f"step {step} is not saved: earlier checkpoints have not been written for "
            f"{waited:.3g} s; see the tiers' warnings, or save less often"
        )
        # A slow tier is no failure. One that takes nothing for longer than anybody would wait for
        # it would otherwise never be heard of but in the log.
        if waited > self._settings.drain_timeout:
            self._failures.add(step, error)
        else:
            log.warning("%s", error)
        self._schedule.saved(step)

    def _not_begun(self, step: int, error: Exception) -> None:
        """There is nothing to capture a step into, or something in it that cannot be captured.

        The next step that is due tries again: whoever goes on must not go on unsaved for ever.
        """
        self._absent(step, 0)
        told = self._not_saved(step, error)
        if isinstance(error, CheckpointError):  # of a kind that cannot be saved: so every time
            self._failure = self._failure or told
        if self._schedule.due == step:
            self._schedule.saved(step)

    def _end(
        self,
        capture: Capture,
        step: int,
        tiers: tuple[str, ...],
        *,
        again: bool = False,
        round: int = 0,
    ) -> None:
        """The step's state is complete: copy what is beside tensors, and let the capture end.

        ``again``: it was captured before, for other tiers than these.
        """
        self._handed = self._handed.union(tiers) if again else frozenset(tiers)
        self._latest, self._problem = step, None
        capture.tiers, capture.again, capture.round = tiers, again, round
        start = time.perf_counter()
        try:
            metrics = numbers(self._metrics)
            groups, contents = self._run.optimizer.param_groups, self._pool.contents
            common = self._run.group.rank == 0
            if not any(s is self._run.optimizer for s in self._extras.shared.values()):
                check_own_state(self._run.optimizer)
            taken = self._extras.take(step, groups, contents.plain(), common=common)
        except Exception as error:
            self._abandon(capture)
            self._absent(step, round)
            self._not_saved(step, error, tiers)
            return
        # Beside the catalog, whose rows other versions read too, and only where there are some.
        more: dict[str, Any] = {"metrics": plain_metrics(metrics)}
        if common:
            things = self._extras.shared
            more |= Kinds(contents.parameters, self._run.optimizer, things).to_json()
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

    def _not_saved(self, step: int, cause: Exception, tiers: Sequence[str] = ()) -> CheckpointError:
        """Tell the training, on whichever thread this is found out; the error it is told.

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
        return error

    def _forget(self, step: int, tiers: Sequence[str]) -> None:
        """It may be tried again, for these tiers; what was captured before for others counts."""
        if self._latest == step:
            self._handed = self._handed.difference(tiers)
            if not self._handed:
                self._latest = -1

    # -- handing over ------------------------------------------------------------------------

    def _complete(self, capture: Capture, step: int, plan: ShardPlan, parts: Parts) -> None:
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
            self._absent(step, capture.round)
            self._pool.give_back(capture.staging.number)
            return
        self._in_background(lambda: self._encode(capture, step, plan, parts), self._worker)
        syncs = self._settings.engine == "sync" and capture.mode != "lazy"
        if (syncs or capture.mode == "sharded") and not self._worker.is_current():
            # Then the rank waits until the engine has its shard, or until that is durable; what
            # takes too long is reported there.
            with suppress(DeadlineError):
                self.drain(self._settings.drain_timeout)

    def _in_background(self, job: Callable[[], None], worker: Worker) -> None:
        """Do what may take long off the training's thread, and what waits for others off copying's.

        That is encoding what is beside tensors, and comparing replicas.
        """
        if not worker.is_current():
            try:
                worker.submit(job)
                return
            except UsageError:
                log.debug("the last checkpoint is handed over by whoever closes")
        job()

    def _encode(self, capture: Capture, step: int, plan: ShardPlan, parts: Parts) -> None:
        """Complete a capture with what is beside tensors, and send it on its way."""
        assert capture.report is not None
        known = self._stats.of(capture.report.id) if capture.again else None
        report = known or capture.report
        try:
            job = self._job(capture, report, plan)
        except Exception as error:
            self._absent(step, capture.round)
            self._pool.give_back(capture.staging.number)
            self._not_saved(step, error, capture.tiers)
            return
        if self._comparison is None:
            self._hand_over(capture, step, job, report)
        else:
            judge = lambda: self._judge(capture, step, job, report, parts)  # noqa: E731
            self._in_background(judge, self._comparing)

    def _judge(
        self, capture: Capture, step: int, job: Job, report: SaveReport, parts: Parts
    ) -> None:
        """Compare with other ranks; what mixes replicas is not handed over by any of them."""
        assert self._comparison is not None
        memory, witness = capture.staging.arena.bytes, capture.witness
        verdict = self._comparison.compare(job.id, capture.round, parts, memory, witness)
        self._stats.differences.extend(verdict.differences)
        if verdict.differences and self._settings.check_replicas == "raise":
            self._pool.give_back(capture.staging.number)
            error = ReplicasDiffer(f"step {step} is not saved: {verdict.told}")
            self._not_saved(step, error, capture.tiers)
            # Where the training waits for its checkpoint, all ranks know at the end of this step.
            self._act_at = 0 if capture.mode == "sharded" else verdict.act_at
            self._withheld_until = max(self._withheld_until, self._act_at)
            self._failure = self._failure or error
            return
        if step <= self._withheld_until:
            # Its own witnesses saw nothing, but it was computed with a replica known to differ, and
            # must not replace one from before that.
            self._pool.give_back(capture.staging.number)
            why = ReplicasDiffer(f"step {step} is not saved: replicas differed before, see the log")
            self._not_saved(step, why, capture.tiers)
            return
        if verdict.differences:
            log.warning("step %d is saved all the same: %s", step, verdict.told)
        # Of two captures of one step, for different tiers, both must have been right.
        report.compared = verdict.compared and report.compared is not False
        self._hand_over(capture, step, job, report)

    def _come(self, step: int) -> int:
        """Ranks have come to save a step; how often they have before."""
        known, count = self._rounds
        self._rounds = step, count + 1 if known == step else 0
        return self._rounds[1]

    def _absent(self, step: int, round: int) -> None:
        """Other ranks need not wait to compare this step."""
        comparison, id = self._comparison, CheckpointId(step, self._attempt.name)
        if comparison is not None:
            self._in_background(lambda: comparison.absent(id, round), self._comparing)

    def _hand_over(self, capture: Capture, step: int, job: Job, report: SaveReport) -> None:
        """Give a complete capture to the engine."""
        known = report is not capture.report
        report.nbytes, report.tiers = job.nbytes, (*report.tiers, *job.tiers)
        report.preparation_seconds = capture.copy_seconds
        report.blocking_seconds = capture.blocking_seconds
        if not known:
            self._stats.saves.append(report)
        try:
            self._engine.submit(job)
        except Exception as error:
            self._not_saved(step, error, capture.tiers)
            return
        try:
            if self._on_captured is not None and not known:
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


def _make_schedule(
    run: RunHandle, settings: CheckpointSettings, key: str
) -> Schedule | TimedSchedule:
    if settings.seconds is not None:
        return TimedSchedule(run.group, settings.seconds, key)
    stretches = settings.mode == "auto" and settings.stretch
    return Schedule(run.group, settings.steps, key, stretches=stretches)
