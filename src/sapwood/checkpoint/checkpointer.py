"""Checkpointer: what a user adds to a training loop, in one line.

A step that is due is captured through the run's own events (see ``capture``), handed to an engine,
and reported here as it becomes safe in one tier after the other.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from sapwood.buffers import Arena
from sapwood.checkpoint.agreement import Agreement
from sapwood.checkpoint.apply import apply
from sapwood.checkpoint.auto import ModeChoice, StepClock
from sapwood.checkpoint.capture import OWNER, Capture, make_capture
from sapwood.checkpoint.choose import choose_tiers
from sapwood.checkpoint.commit import Commit
from sapwood.checkpoint.contents import Contents, collect
from sapwood.checkpoint.engine import (
    Durable,
    Engine,
    Failed,
    Freed,
    Job,
    Progress,
    start_engine,
    tiers_to_read,
)
from sapwood.checkpoint.extras import Extras, Stateful
from sapwood.checkpoint.nodes import find_nodes, find_peers
from sapwood.checkpoint.pruner import Pruner
from sapwood.checkpoint.report import CheckpointStats, SaveReport
from sapwood.checkpoint.restore import Loaded, load_newest
from sapwood.checkpoint.retention import Policy, last
from sapwood.checkpoint.schedule import Schedule
from sapwood.checkpoint.settings import CheckpointSettings, tier_specs
from sapwood.checkpoint.staging import Staging
from sapwood.errors import CheckpointError, ConfigError
from sapwood.events import StepEnded, TensorUpdated
from sapwood.runtime.ending import AtExit
from sapwood.runtime.handle import RunHandle
from sapwood.runtime.settings import UNSET, resolve
from sapwood.runtime.worker import Worker
from sapwood.state.shards import ShardPlan, plan_shards
from sapwood.tiers.make import make_tiers
from sapwood.tiers.record import CheckpointId
from sapwood.tiers.spec import TierSpec

__all__ = ["Checkpointer"]

log = logging.getLogger(__name__)
_ARENAS = 2
_COMMIT_PATIENCE = 10.0
# How much a node's disk must hold for tiers="auto": weights and two states of Adam, four times.
_OPTIMIZER_STATES, _LOCAL_CHECKPOINTS = 3, 4
_SHARED = ("external", "s3")


class Checkpointer:
    """Saves and restores a run.

    Args:
        run: the run.
        place: a folder, or ``s3://bucket/prefix``.
        tiers: where checkpoints go, cheapest first, such as ``("memory", "local:/scratch",
            "partner", "parity:4+2", "external")``; by default memory and ``place``. With "auto" a
            short test looks for a fast disk of the node.
        shared: what else to save, by name: anything with ``state_dict`` and ``load_state_dict``
            that is the same on every rank. Schedulers of the run are saved anyway.
        own: the same for what differs from rank to rank, such as a reader's position in the data.
        on_captured: called with the report when this rank's bytes are taken.
        on_durable: called on rank 0 with report and tier when all shards are safe in a tier.
        retention: which checkpoints to keep, in place of ``keep``; see ``checkpoint.retention``.
        settings: any field of ``CheckpointSettings``: every, mode, overhead, engine, keep, ...
            Each can also come from ``SAPWOOD_<NAME>`` or ``[checkpoint]`` in sapwood.toml.

    Attributes:
        metrics: numbers saved with every checkpoint, for ``retention.best``; set them as you go.
        stats: what each checkpoint cost, and when it was safe where.
    """

    def __init__(
        self,
        run: RunHandle,
        place: str | Path = "ckpts",
        *,
        tiers: Sequence[str | TierSpec] | Literal["auto"] | None = None,
        shared: Mapping[str, Stateful] | None = None,
        own: Mapping[str, Stateful] | None = None,
        on_captured: Callable[[SaveReport], None] | None = None,
        on_durable: Callable[[SaveReport, str], None] | None = None,
        retention: Policy | None = None,
        every: int | None = UNSET,
        mode: str = UNSET,
        **settings: Any,
    ) -> None:
        """Start the engine; nothing is saved yet."""
        given = {"every": every, "mode": mode, **settings}
        self.settings = resolve(CheckpointSettings, "checkpoint", given).value
        self.stats = CheckpointStats()
        self.metrics: dict[str, float] = {}
        self._run = run
        self._nodes = find_nodes(run.group)
        if isinstance(tiers, str):
            tiers = self._choose(tiers, place)
        self.specs = tier_specs(place, tiers)
        self._nodes = find_peers(run.group, self._nodes, self.specs)
        self._extras = Extras({**_schedulers(run), **(shared or {})}, own or {})
        self._on_captured, self._on_durable = on_captured, on_durable
        self._attempt = run.group.share_text("checkpoint attempt", secrets.token_hex(3))
        self._schedule = Schedule(
            run.group,
            self.settings.every,
            f"ckpt/{self._attempt}/due",
            stretches=self.settings.mode == "auto",
        )
        self._clock, self._choice = StepClock(), ModeChoice()
        self._lock = threading.Lock()
        self._contents: Contents | None = None
        self._plan: ShardPlan | None = None
        self._stagings: list[Staging] = []
        self._free: set[int] = set()
        self._retired: dict[int, Arena] = {}
        self._capture: Capture | None = None
        self._capture_step = 0
        self._saved = 0
        self._latest = -1
        self._trusted = False
        self._said_rarer = False
        self._waited = 0.0
        self._failure: Exception | None = None
        self._stuck = False
        self._closed = False
        self._worker = Worker("sapwood-capture")
        leads = self._nodes.ranks[0] == run.group.rank
        self._agreement = Agreement(run.group, self._attempt)
        self._commit = Commit(run.group, self._attempt, self._whole, watches=leads)
        self._pruners = self._make_pruners(retention) if leads else {}
        self._engine: Engine = start_engine(
            specs=self.specs,
            nodes=self._nodes,
            settings=self.settings,
            listener=self._heard,
            rank=run.group.rank,
            token=run.group.share_text("engine token", secrets.token_hex(16)),
            log=run.folder / f"engine-{self._nodes.node}.log",
        )
        if self._nodes.addresses:
            run.group.gather_text("engine", "ready")  # who looks at other nodes finds them
        self._subscriptions = [
            run.events.subscribe(TensorUpdated, self._updated, name="checkpoint"),
            run.events.subscribe(StepEnded, self._step_ended, name="checkpoint"),
        ]
        # After the run's own, and so before it: whoever forgets to close loses nothing.
        self._at_exit = AtExit(self.close)
        self._schedule.start(run.step_count)
        self._arm(run.step_count + 1)

    def _choose(self, wanted: str, place: str | Path) -> Sequence[str]:
        if wanted != "auto":
            raise ConfigError(
                f'tiers is {wanted!r}, expected "auto" or a list such as ["external"]'
            )
        size = sum(t.numel() * t.element_size() for t in self._run.tensors().values())
        need = _OPTIMIZER_STATES * size * _LOCAL_CHECKPOINTS // len(self._nodes.nodes)
        return choose_tiers(self._run.group, self._nodes, place, need)

    # -- saving ------------------------------------------------------------------------------

    def save(self, metrics: Mapping[str, float] | None = None) -> SaveReport:
        """Take a checkpoint of the step that has just ended; all ranks must call it.

        Returns when the bytes are captured; ``wait`` waits until they are durable. ``metrics`` are
        added to ``self.metrics`` first. A step that was due is saved already, and only reported.

        Raises:
            CheckpointError: no staging memory became free in time, or copying failed.
        """
        self._check_open()
        step = self._run.step_count
        self.metrics.update(metrics or {})
        if step == self._latest:
            return self._finished(step)
        self._disarm()
        capture = self._begin_within(step, self.settings.drain_timeout)
        if capture is None:
            raise CheckpointError(
                f"earlier checkpoints were not written in {self.settings.drain_timeout:g} s"
            )
        self._end(capture, step)
        self._arm(step + 1)
        return self._finished(step)

    def _finished(self, step: int) -> SaveReport:
        """The report of a step whose capture has begun, once it is complete."""
        self._worker.drain(self.settings.drain_timeout)
        self._raise_failure()
        report = self.stats.of(CheckpointId(step, self._attempt))
        if report is None:
            raise CheckpointError(f"step {step} was not captured; see the log")
        return report

    def _updated(self, event: TensorUpdated) -> None:
        capture = self._capture
        if capture is not None and event.step == self._capture_step:
            try:
                capture.updated(event)
            except Exception as error:
                capture.fail(error)

    def _step_ended(self, event: StepEnded) -> None:
        capture, self._capture = self._capture, None
        self._measure(saved=capture is not None)
        if capture is not None and self._capture_step == event.step:
            self._finish(capture, event.step)
        elif self._schedule.due == event.step:
            self._save_late(event.step)
        self._arm(event.step + 1)
        self._worker.check()
        self._raise_failure()

    def _raise_failure(self) -> None:
        """Raise what went wrong since the last time, in the background or just now."""
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def _save_late(self, step: int) -> None:
        """No staging memory was free when the step began: wait for some, but not for ever."""
        # Once is enough: a tier, or an engine, that is stuck must not slow every step down.
        capture = self._begin_within(step, 0.0 if self._stuck else self.settings.patience)
        if capture is not None:
            self._finish(capture, step)
            return
        self._stuck = True
        self.stats.skipped.append(step)
        log.warning(
            "step %d is not saved: earlier checkpoints have not been written for %g s; see the "
            "tiers' warnings, or save less often",
            step,
            self.settings.patience,
        )
        self._schedule.saved(step)

    def _begin_within(self, step: int, seconds: float) -> Capture | None:
        deadline = time.monotonic() + seconds
        while (capture := self._begin(step, "sharded")) is None:
            if time.monotonic() > deadline:
                return None
            time.sleep(0.001)
        return capture

    def _measure(self, *, saved: bool) -> None:
        cost = self._clock.ended(time.perf_counter(), saved=saved)
        waited, self._waited = self._waited, self._run.fence_wait(OWNER)
        if cost is not None and self.stats.saves:
            report = self.stats.saves[-1]
            report.overhead_seconds = cost
            report.fence_seconds = self._waited - waited
            self._choice.note(report.mode, cost)

    def _finish(self, capture: Capture, step: int) -> None:
        assert self._contents is not None
        if not self._contents.current():
            # Tensors were replaced or appeared (an optimizer's state in its first step).
            self._abandon(capture)
            fresh = self._begin(step, "sharded")
            if fresh is None:
                self._save_late(step)
                return
            capture = fresh
        self._trusted = True
        self._schedule.saved(step, at_least=self._interval())
        self._end(capture, step)

    def _interval(self) -> int:
        if self.settings.mode != "auto":
            return 1
        steps = self._choice.interval(self._clock.usual, self.settings.overhead)
        asked = self.settings.every or 1
        if steps > asked and not self._said_rarer and self._run.group.rank == 0:
            self._said_rarer = True
            log.warning(
                "checkpoints every %d steps would cost more than %g %% of the time and are taken "
                "less often; raise overhead=, or insist with mode='lazy'",
                asked,
                self.settings.overhead * 100,
            )
        return steps

    def _end(self, capture: Capture, step: int) -> None:
        """The step's state is complete: take what is small at once, and let the capture end."""
        assert self._contents is not None
        self._latest = step
        start = time.perf_counter()
        try:
            capture.metrics = dict(self.metrics)
            capture.extras = self._extras.take(
                step, self._run.optimizer.param_groups, self._contents.plain
            )
        except Exception:
            self._abandon(capture)
            raise
        capture.blocking_seconds += time.perf_counter() - start
        capture.ended()

    def _abandon(self, capture: Capture) -> None:
        """Its bytes are of no use: let held buckets go, and use its staging memory again."""
        capture.abandon()
        self._freed(capture.staging.number)

    def _arm(self, step: int) -> None:
        """Get ready to capture ``step``, if it is due."""
        if self._schedule.due == step:
            self._capture_step = step
            # What was right at the last checkpoint is taken to be right; its end looks again.
            self._capture = self._begin(step, self._mode(), trusting=self._trusted)

    def _disarm(self) -> None:
        """Give the staging memory back that waits for a step to come."""
        capture, self._capture = self._capture, None
        if capture is not None:
            self._abandon(capture)

    def _mode(self) -> str:
        mode = self.settings.mode
        return self._choice.mode if mode == "auto" else mode

    def _begin(self, step: int, mode: str, *, trusting: bool = False) -> Capture | None:
        """A capture into free staging memory; None if there is none."""
        if not trusting:
            self._follow()
        with self._lock:
            if not self._free:
                return None
            number = self._free.pop()
        contents, plan = self._contents, self._plan
        assert contents is not None
        assert plan is not None
        staging = next(s for s in self._stagings if s.number == number)
        # By the time it is complete, the run may have another plan.
        done: Callable[[Capture], None] = lambda c: self._captured(c, step, plan)  # noqa: E731
        trace = self._run.trace
        capture = make_capture(mode, staging, contents.by_parameter, done, self._worker, trace)
        capture.on_error = lambda error: self._spoilt(step, error)
        return capture

    def _spoilt(self, step: int, cause: Exception) -> None:
        error = CheckpointError(
            f"step {step} is not saved, its tensors could not be copied: "
            f"{type(cause).__name__}: {cause}"
        )
        error.__cause__ = cause
        self._failure = self._failure or error

    def _follow(self) -> None:
        """Plan anew if the run's tensors are not those of the plan."""
        if self._contents is not None and self._contents.current():
            return
        run = self._run
        everyone = tuple(range(run.group.world))
        holders = (0,) if self.settings.mode == "single" else everyone
        with run.trace.span("ckpt_plan"):
            self._contents = collect(run.model, run.optimizer, lambda name: holders)
            self._plan = plan_shards(self._contents.catalog, run.group.world)
            shard = self._plan.shards[run.group.rank]
            self._retire()
            for _ in range(_ARENAS):
                arena = Arena(shard.nbytes)
                number = self._engine.lend(arena)
                self._stagings.append(Staging(self._contents, shard, arena, number))
                self._free.add(number)

    def _retire(self) -> None:
        """Put the staging memory of an old plan aside; what is still on its way ends by itself."""
        with self._lock:
            for staging in self._stagings:
                self._retired[staging.number] = staging.arena
            self._stagings = []
            idle, self._free = self._free, set()
        for number in idle:
            self._give_up(number)

    def _give_up(self, number: int) -> None:
        arena = self._retired.pop(number, None)
        if arena is not None:
            self._engine.recall(number)
            arena.close()

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
            self._freed(capture.staging.number)
            return
        report = SaveReport(
            id=job.id,
            mode=capture.mode,
            nbytes=capture.staging.arena.nbytes,
            created=job.created,
            metrics=capture.metrics,
        )
        report.preparation_seconds = capture.copy_seconds
        report.blocking_seconds = capture.blocking_seconds
        self.stats.saves.append(report)
        self._saved += 1
        try:
            self._engine.submit(job)
            if self._on_captured is not None:
                self._on_captured(report)
        except Exception as error:
            self._failure = self._failure or error

    def _job(self, capture: Capture, step: int, plan: ShardPlan) -> Job:
        return Job(
            id=CheckpointId(step, self._attempt),
            rank=self._run.group.rank,
            arena=capture.staging.number,
            plan=plan,
            created=time.time(),
            extras={**capture.extras(), "metrics": capture.metrics},
            tiers=tuple(s.kind for s in self.specs if self._saved % s.every == 0),
        )

    # -- what the engine says ----------------------------------------------------------------

    def _heard(self, progress: Progress) -> None:
        if isinstance(progress, Freed):
            self._stuck = False
            self._freed(progress.arena)
            return
        report = self.stats.of(progress.id)
        if report is None:
            return
        if isinstance(progress, Failed):
            log.warning("checkpoint %s, tier %s: %s", progress.id, progress.tier, progress.message)
            if progress.final:
                report.failed[progress.tier] = progress.message
        elif isinstance(progress, Durable):
            report.durable[progress.tier] = progress.seconds
            if self._run.trace.on:
                now = time.perf_counter_ns()
                start = now - int(progress.seconds * 1e9)
                lane, step = f"ckpt {progress.tier}", progress.id.step
                self._run.trace.complete("ckpt_tier", start, now, lane=lane, step=step)
            self._commit.durable(progress.id, progress.tier)

    def _whole(self, id: CheckpointId, tier: str) -> None:
        """Every rank's shard is safe in a tier; heard on one rank per node."""
        report = self.stats.of(id)
        if report is None:
            return
        report.whole.add(tier)
        if self._on_durable is not None and self._run.group.rank == 0:
            self._on_durable(report, tier)
        pruner = self._pruners.get(tier)
        if pruner is not None:
            pruner.whole(id, report.created, report.metrics)

    def _make_pruners(self, retention: Policy | None) -> dict[str, Pruner]:
        """For the tiers this rank looks after: its node's, and on rank 0 those all nodes share."""
        policy = retention or (None if self.settings.keep is None else last(self.settings.keep))
        if policy is None:
            return {}
        return {
            tier.name: Pruner(tier, policy, lambda id, name: self._engine.drop(id, (name,)))
            for tier in make_tiers(self.specs, self._nodes)
            if tier.name != "memory" and (tier.name not in _SHARED or self._run.group.rank == 0)
        }

    def _freed(self, number: int) -> None:
        with self._lock:
            if any(s.number == number for s in self._stagings):
                self._free.add(number)
        self._give_up(number)

    # -- restoring ---------------------------------------------------------------------------

    def restore_latest(self, *, optimizer: bool = True) -> Loaded | None:
        """Restore the newest whole checkpoint, on any number of ranks; None if there is none.

        Raises:
            CheckpointError: none of those there is whole, or it is of another model.
        """
        return self._restore(None, optimizer)

    def restore(self, step: int, *, optimizer: bool = True) -> Loaded:
        """Restore the checkpoint of a step.

        Raises:
            CheckpointError: it is not there, not whole, or of another model.
        """
        loaded = self._restore(step, optimizer)
        if loaded is None:
            raise CheckpointError(f"there is no checkpoint of step {step}, nor any other")
        return loaded

    def _restore(self, step: int | None, optimizer: bool) -> Loaded | None:
        self._check_open()
        self.wait()
        run = self._run
        files = () if optimizer else ("model",)
        with run.trace.span("ckpt_restore"):
            # Half of what ranks wait for each other: one node's stuck engine must not end the run.
            timeout = min(self.settings.drain_timeout, run.group.timeout / 2)
            places = tiers_to_read(self._engine, self.specs, self._nodes, timeout=timeout)
            try:
                loaded = load_newest(run.group, places, step=step, files=files)
            finally:
                for tier in places:
                    tier.close()
            if loaded is None:
                return None
            apply(run.model, run.optimizer, loaded, with_optimizer=optimizer)
            for note in (*self._extras.restore(loaded.common, loaded.mine), *loaded.skipped):
                log.warning("while restoring %s: %s", loaded.id, note)
        run.resume_at(loaded.id.step)
        self._trusted = False
        self._disarm()
        self._schedule.start(run.step_count)
        self._arm(run.step_count + 1)
        return loaded

    # -- the end -----------------------------------------------------------------------------

    def wait(self, timeout: float | None = None) -> None:
        """Wait until every checkpoint taken so far is durable in its tiers, or given up.

        Raises:
            CheckpointError: it took longer than ``timeout`` (by default ``drain_timeout``) seconds.
        """
        seconds = self.settings.drain_timeout if timeout is None else timeout
        self._worker.drain(seconds)
        if not self._engine.drain(seconds):
            raise CheckpointError(f"checkpoints were still under way after {seconds:g} s")

    def close(self) -> None:
        """Finish what is under way and end the engine; calling it again does nothing."""
        if self._closed:
            return
        self._closed = True
        self._at_exit.forget()
        for subscription in self._subscriptions:
            subscription.cancel()
        if self._capture is not None:
            self._capture.abandon()
        self._worker.close(self.settings.drain_timeout)
        self._engine.drain(self.settings.drain_timeout)
        self._commit.close(_COMMIT_PATIENCE)
        if self._nodes.addresses:
            # What other nodes still bring here needs this node's engine.
            self._commit.meet(_COMMIT_PATIENCE)
        self._engine.close(self.settings.drain_timeout)
        self._retire()
        for arena in self._retired.values():
            arena.close()
        if self._failure is not None:
            log.error("the last checkpoint was not saved: %s", self._failure)

    def __enter__(self) -> Checkpointer:
        """Close at the end of a ``with`` block."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close."""
        self.close()

    def _check_open(self) -> None:
        if self._closed:
            raise CheckpointError("this Checkpointer is closed; make a new one")


def _schedulers(run: RunHandle) -> dict[str, Stateful]:
    named: dict[str, Stateful] = {f"scheduler {n}": s for n, s in enumerate(run.schedulers)}
    if run.scaler is not None:
        named["scaler"] = run.scaler
    return named
