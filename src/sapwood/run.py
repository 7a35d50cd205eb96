"""Run: the user's handle on one training run, joining engine, events, trace and folder."""

from __future__ import annotations

import dataclasses
import logging
import operator
import os
import time
import weakref
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from sapwood import trace as tracing
from sapwood.checkpoint.settings import CheckpointSettings
from sapwood.clone.donor import Donor
from sapwood.clone.extras import CloneExtras
from sapwood.clone.forked import Fork, join_fork
from sapwood.clone.order import ForkedFrom
from sapwood.clone.report import ForkReport
from sapwood.clone.settings import CloneSettings
from sapwood.errors import ConfigError, UsageError
from sapwood.events import EventBus, StateReplaced, StepEnded
from sapwood.runtime import faults
from sapwood.runtime.ending import AtExit
from sapwood.runtime.facts import final_status, run_facts
from sapwood.runtime.folder import RunFolder, new_run_id
from sapwood.runtime.group import Group
from sapwood.runtime.handle import with_run_state
from sapwood.runtime.settings import (
    UNSET,
    Resolved,
    check_variables,
    resolve,
    warn_of_unknown_variables,
)
from sapwood.runtime.stopped import Stopped
from sapwood.runtime.stopping import Stopping, StopSettings, check_time_left
from sapwood.state.extras import Stateful, things_by_name
from sapwood.state.tensors import describe_model, named_buffers, named_parameters
from sapwood.sync import (
    Averaging,
    Claim,
    Context,
    Members,
    Synchroniser,
    SyncSettings,
    SyncStats,
    Tuner,
    Views,
    check_kinds,
    check_model,
    check_scaler,
    check_schedulers,
    choose_averager,
    choose_mode,
    give_rank0_values,
    make_engine,
)

if TYPE_CHECKING:
    from torch.amp.grad_scaler import GradScaler
    from torch.optim.lr_scheduler import LRScheduler

__all__ = ["Run", "RunSettings"]

log = logging.getLogger(__name__)
_PLAIN = (int, float, str, tuple, type(None))
_HALF_ENDED = (
    "an exception ended the last run.step() after the weights were updated, so schedulers, the "
    "number of steps and checkpoints do not fit them; restore a checkpoint, or make a new Run"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSettings(StopSettings):
    """Where a run leaves its traces, and when it stops."""

    folder: str | Path = "runs"
    """The folder that holds the run's own folder."""
    trace: bool = False
    """Write spans and counters of every rank to ``<run>/trace``."""

    def __post_init__(self) -> None:
        """Refuse what cannot be meant."""
        StopSettings.__post_init__(self)
        if not str(self.folder):  # it would be the current one, where nobody looks for runs
            raise ConfigError("folder is '', expected a folder for runs; '.' is the current one")


SETTINGS: dict[str, type] = {
    "run": RunSettings,
    "sync": SyncSettings,
    "checkpoint": CheckpointSettings,
    "clone": CloneSettings,
}
"""The settings class of each section of ``sapwood.toml``."""
_open: weakref.WeakSet[Run] = weakref.WeakSet()
"""All Runs of this process that are not closed."""


class Run:
    """One training run: an engine, its events, its state, its trace and its folder.

    Args:
        model: the model, the same on every rank; rank 0's values are given to all.
        optimizer: made from this model's parameters; it keeps all optimizer state.
        schedulers: stepped at the end of each step (you may step yours yourself instead).
        scaler: a ``torch.amp.GradScaler``; scale the loss with it, the rest is done in ``step``.
        id: the run's id; made up if not given.
        folder: where run folders are kept (default ``runs``).
        trace: write a trace (default off).
        time_limit: stop, as if asked to, in time before so much has passed since the job began:
            seconds, "3h55m", or "slurm" (default none).
        stop_timeout: how long a stop waits for its checkpoint (default "60s").
        stop_signals: which signals ask for a stop (default SIGTERM and SIGUSR1; None for none).
        settings: any field of ``SyncSettings``: engine, update, clip_grad_norm, fused, bucket_mb,
            timeout, ... Each can also come from ``SAPWOOD_SYNC_<NAME>``, or ``[sync]`` in the file.

    Attributes:
        model: what to call in the training loop.
        optimizer: the optimizer given.
        events: subscribe here: ``run.events.subscribe(TensorUpdated, callback, name=...)``.
        trace: leave spans of your own here.
        step_count: steps ended so far; events of the n-th step say ``step=n``, from 1.
    """

    _closed = True  # until it is whole, there is nothing to close

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        schedulers: Sequence[LRScheduler] = (),
        scaler: GradScaler | None = None,
        id: str | None = None,
        folder: str | Path = UNSET,
        trace: bool = UNSET,
        time_limit: float | str | None = UNSET,
        stop_timeout: float | str = UNSET,
        stop_signals: str | Sequence[str] | None = UNSET,
        **settings: Any,
    ) -> None:
        """Join the group, check that all ranks hold the same, and install the engine."""
        stops = {"time_limit": time_limit, "stop_timeout": stop_timeout}
        given = {"folder": folder, "trace": trace, "stop_signals": stop_signals, **stops}
        check_variables(SETTINGS)
        places = resolve(RunSettings, "run", given)
        check_time_left(places.value)
        beside = ("schedulers", "scaler", "id", *given)
        sync = resolve(SyncSettings, "sync", settings, beside=beside)
        self.optimizer = optimizer
        self.events = EventBus()
        self.schedulers: list[LRScheduler] = []
        self.scaler = scaler
        self.step_count = 0
        self.shares_buffers = sync.value.broadcast_buffers
        self._pid = os.getpid()
        self._half_ended = False
        self._donor: Donor | None = None
        self._fork: Fork | None = None
        self._claim: Claim | None = None
        self._views: Views | None = None
        self._averaging: Averaging | None = None
        self._next_flush = 0.0
        self._folder_made = False
        self.trace: tracing.Tracer = tracing.OFF
        self.group = Group.join(check_model(model), timeout=sync.value.timeout)
        if self.group.rank == 0:
            warn_of_unknown_variables(SETTINGS)
        try:
            # In the group, so that the other ranks hear of a refusal and need not wait for it.
            check_kinds(model, optimizer)
            check_scaler(scaler)
            self.schedulers += check_schedulers(schedulers, optimizer)
            context = self._start(model, scaler, id, places, sync)
            self._mode = context.mode
            self.model = self._engine.model
            this = weakref.ref(self)  # a Run that is lost must not be kept by its own signals
            self._stopping = Stopping(
                self.group, self.events, places.value, lambda: _last_whole_step(this())
            )
        except BaseException as error:
            self._give_up(error)
            raise
        self._at_exit = AtExit(self.close)
        self._closed = False
        _open.add(self)
        try:
            self._go_on_as_fork()
        except BaseException as error:
            self.close(error)
            raise

    def _start(
        self,
        model: nn.Module,
        scaler: GradScaler | None,
        run_id: str | None,
        places: Resolved[RunSettings],
        sync: Resolved[SyncSettings],
    ) -> Context:
        group = self.group
        self._claim = Claim(model, self.optimizer)
        self._members = Members(model, self.optimizer)
        names, parameters = self._members.read()
        mode, reason = choose_mode(
            self.optimizer,
            sync.value.update,
            clips=sync.value.clip_grad_norm is not None,
            scales=scaler is not None and scaler.is_enabled(),
        )
        log.info("updates are %s: %s", mode, reason)
        group.check_same("model", describe_model(model))
        group.check_same("optimizer or settings", self._lines(mode, sync.value))
        self._fork = join_fork(group, model, self.optimizer, self.schedulers)
        if self._fork is None:
            give_rank0_values(group, model)
        averaging = choose_averager(
            group,
            sync.value.averaging,
            engine=sync.value.engine,
            nbytes=sum(p.numel() * p.element_size() for p in parameters),
        )
        self._averaging = averaging
        log.info("averaging is %s: %s", averaging.averager.name, averaging.reason)
        self.id = self._claim.run = group.share_text("run id", run_id or new_run_id())
        self._place = RunFolder(places.value.folder, self.id)
        if group.rank == 0:
            layout = {
                "update": mode,
                "averaging": averaging.averager.name,
                "averaging_reason": averaging.reason,
            }
            self._place.create(run_facts(group, (places, sync), layout, self.forked_from))
            self._folder_made = True
            self._place.status("running", 0)
        group.share_text("run folder", "made")
        if places.value.trace:
            self.trace = tracing.open_trace(
                self._place.trace_file(group.rank),
                rank=group.rank,
                world=group.world,
                run_id=self.id,
            )
            why = averaging.reason
            self.trace.instant("averaging", lane="comm", way=averaging.averager.name, reason=why)
        self._views = Views(self.optimizer, sync.value.fused, mode)
        self.tuner = Tuner(group, averaging.averager.name, sync.value.bucket_mb, mode)
        context = Context(
            model=model,
            names=names,
            parameters=parameters,
            views=self._views,
            mode=mode,
            scaler=scaler,
            group=group,
            averaging=averaging,
            tuner=self.tuner,
            events=self.events,
            trace=self.trace,
            settings=sync.value,
        )
        self._engine: Synchroniser = make_engine(context)
        self._engine.attach()
        return context

    def _give_up(self, error: BaseException) -> None:
        """The constructor failed: say so to the other ranks and in the folder, and leave."""
        self.group.board.post(f"{type(error).__name__}: {error}")
        if self._folder_made:
            self._place.status(*final_status(0, error, None))
        self._abandon_fork()
        engine: Synchroniser | None = vars(self).get("_engine")
        if engine is not None:
            engine.close()
        self._let_go()
        self.trace.close()
        self.group.close()

    # -- what a training loop needs ----------------------------------------------------------

    def step(self) -> StepEnded:
        """End the step: wait for averages and updates, step schedulers, announce the new state.

        Raises:
            SubscriberError: a subscriber raised since the last step; the step itself is complete.
            PeerFailed: another rank failed, died or left.
            Stopped: the run was asked to stop; the step is complete on all ranks, and saved.
        """
        self._check_open()
        self._stopping.check()
        if self._half_ended:
            raise UsageError(_HALF_ENDED)
        self._members.check_trained()
        if self._fork is not None:
            self._fork.finish()
        faults.point("run.step", step=self.step_count + 1)
        outcome = self._engine.finish()
        self._half_ended = True
        self._update_scale()
        self.optimizer._opt_called = True  # type: ignore[attr-defined]  # schedulers look for it
        for scheduler in self.schedulers:
            scheduler.step()
        self.step_count += 1
        ended = StepEnded(
            step=self.step_count, skipped=outcome.skipped, grad_norm=outcome.grad_norm
        )
        self.events.publish(ended)
        self._half_ended = False
        if self.trace.on:
            self.trace.instant("step_ended", step=self.step_count)
            self._flush_trace()
        if self.group.rank == 0:
            self._place.learned["buckets"] = self.tuner.learned
            self._place.status("running", self.step_count, now=False)
        self._stop_if_asked()
        self.events.raise_pending()
        return ended

    def _update_scale(self) -> None:
        """After all that was scaled by it is unscaled: Runs may share a scaler and a backward."""
        scaler = self.scaler
        if scaler is None or not scaler.is_enabled():
            return
        others = [run for run in _open if run is not self and run.scaler is scaler]
        states = scaler._per_optimizer_states.values()
        if any(state["found_inf_per_device"] for state in states) and not any(
            run._engine.begun for run in others
        ):
            scaler.update()

    def _stop_if_asked(self) -> None:
        try:
            self._stopping.step_ended(self.step_count)
        except Stopped as stopped:
            # At once: whoever ends this process next may not let it come to `close`.
            if self.group.rank == 0:
                self._place.status(*final_status(self.step_count, None, stopped))
            raise

    @property
    def stopping(self) -> bool:
        """Whether the run is asked to stop: a soon coming ``step`` raises ``Stopped``.

        Ranks learn of it at different moments: end a long evaluation early for it, but let
        nothing depend on it that all ranks must do alike.
        """
        return self._stopping.asked

    @contextmanager
    def accumulate(self, *, active: bool = True) -> Iterator[None]:
        """Inside, backward only adds to the local gradients; the first one outside averages all.

        Put forward and backward of a part inside. With ``active=False`` it does nothing, for loops
        that know by a flag which part is the last: ``with run.accumulate(active=not last):``.
        """
        before = self._engine.accumulating
        self._engine.accumulating = before or active
        try:
            yield
        finally:
            self._engine.accumulating = before

    def wait(self) -> None:
        """Wait until this step's gradients are averaged; ``p.grad`` then holds the averages."""
        self._check_open()
        self._engine.wait()

    def check_between_steps(self, what: str) -> None:
        """See that weights are those of a step that has ended; ``what`` is called, for the message.

        Raises:
            UsageError: a step has begun, and weights may be updated already; or the run is closed.
        """
        self._check_open()
        if self._engine.begun:
            self._engine.wait()  # a step that broke says why
            raise UsageError(
                f"{what} is called between backward() and run.step(), when weights may be updated "
                "already: call it after run.step()"
            )

    def resume_at(self, step: int) -> None:
        """Go on as if ``step`` steps had ended: call it between steps, after restoring them."""
        self.check_between_steps("resume_at()")
        step = operator.index(step)
        if step < 0:
            raise UsageError(f"step is {step}, expected the number of steps that have ended")
        self._engine.resume_at(step + 1)
        self.step_count = step
        self._half_ended = False
        self.events.publish(StateReplaced(step=step))

    # -- forks -------------------------------------------------------------------------------

    def allow_clones(
        self,
        *,
        shared: Mapping[str, Stateful] | None = None,
        own: Mapping[str, Stateful] | None = None,
        after_step: Collection[str] | None = None,
        **settings: Any,
    ) -> None:
        """Let others fork this run from now on: ``sapwood fork``; all ranks must call it.

        In a run that is a fork itself, this gives ``shared``, ``own`` and random numbers the state
        they had in the parent; so call it where the parent does, just before the training loop.

        Args:
            shared: what else belongs to the run, by name, and is the same on every rank.
            own: the same for what differs from rank to rank, such as a position in the data.
            after_step: names of what the loop changes after ``run.step()``; by default schedulers
                of this optimizer and whatever holds a copy of the weights.
            settings: any field of ``CloneSettings``: approach, transport, patience, late, ...
                Each can also come from ``SAPWOOD_CLONE_<NAME>`` or ``[clone]`` in sapwood.toml.
        """
        self._check_open()
        if self._donor is not None:
            raise UsageError("clones are allowed already; call allow_clones once")
        chosen = resolve(CloneSettings, "clone", settings).value
        shared, own = things_by_name("shared", shared), things_by_name("own", own)
        extras = CloneExtras(with_run_state(self, shared), shared, own, after_step)
        if self._fork is not None:
            self._fork.restore(shared, own)
        self._donor = Donor(self, chosen, extras)

    def start_standbys(self) -> int:
        """Let clones begin that were started with ``--standby``; how many groups did.

        Call it on rank 0, or on all ranks; elsewhere, ``sapwood fork RUN --go`` does the same.
        """
        return 0 if self._donor is None else self._donor.start_standbys()

    @property
    def forked_from(self) -> ForkedFrom | None:
        """The run and step this run was forked from, and what was changed; None if it was not."""
        return None if self._fork is None else self._fork.forked_from

    @property
    def forks(self) -> list[ForkReport]:
        """Every fork of this run that was asked for, and what it cost this rank."""
        return [] if self._donor is None else self._donor.reports

    def override(self, path: str, default: Any) -> Any:
        """What ``--set path=value`` said when this run was forked, else ``default``."""
        return default if self._fork is None else self._fork.override(path, default)

    def _go_on_as_fork(self) -> None:
        if self._fork is not None:
            self.resume_at(self._fork.forked_from.step)
            self._fork.attach(self)

    def _abandon_fork(self) -> None:
        if self._fork is not None:
            self._fork.abandon()

    def wait_ready(self) -> None:
        """In a fork, wait until its whole state is there: before you look at weights yourself."""
        if self._fork is not None:
            self._fork.finish()

    # -- what others want to know ------------------------------------------------------------

    @property
    def rank(self) -> int:
        """This process's rank."""
        return self.group.rank

    @property
    def world(self) -> int:
        """The number of ranks."""
        return self.group.world

    @property
    def folder(self) -> Path:
        """The run's own folder."""
        return self._place.path

    @property
    def update_mode(self) -> str:
        """``layerwise`` (during backward), ``deferred`` or ``whole`` (after it)."""
        return self._mode

    @property
    def buckets(self) -> tuple[tuple[str, ...], ...]:
        """Names by bucket; empty before the first backward."""
        return self._engine.buckets

    @property
    def stats(self) -> SyncStats:
        """Counts and times of the engine."""
        return self._engine.stats

    def fence_wait(self, owner: str) -> float:
        """Seconds updates have waited so far for the holds of a subscriber."""
        return self._engine.stats.fence_seconds.get(owner, 0.0)

    def generation(self, name: str) -> int:
        """How often the parameter ``name`` was updated in this run."""
        return self._engine.generation(name)

    def tensors(self) -> dict[str, Tensor]:
        """Parameters and buffers by name."""
        return {**named_parameters(self.model), **named_buffers(self.model)}

    # -- the end -----------------------------------------------------------------------------

    def close(self, error: BaseException | None = None) -> None:
        """Leave the group, end threads, complete the run folder; calling it again does nothing."""
        if self._closed:
            return
        self._closed = True
        _open.discard(self)
        self._at_exit.forget()
        error = error or self.group.board.uncaught
        stopped = self._stopping.stopped
        if isinstance(error, Stopped):
            error = None  # an ending all ranks agreed on: nobody failed
        if isinstance(error, GeneratorExit) or (
            isinstance(error, SystemExit) and error.code in (None, 0)
        ):
            error = None  # the script ends, and says that all is well
        self._stopping.close()
        self._abandon_fork()
        if self._donor is not None:
            self._donor.close()
        if error is None:
            self.group.leave(self.step_count)
        else:
            self.group.board.post(f"{type(error).__name__}: {error}")
        self._engine.close()
        self._let_go()
        self.trace.close()
        if self.group.rank == 0:
            self._place.status(*final_status(self.step_count, error, stopped))
        self.group.close()

    def __del__(self) -> None:
        """Close a Run that was lost: its hooks on the model would take part in the next one's."""
        # A process forked from this one must not leave the group in its name.
        if not self._closed and self._pid == os.getpid():
            log.info("run %s was dropped without close(); closing it now", self.id)
            try:
                self.close()
            except Exception as error:
                log.error("while closing run %s, which was dropped: %s", self.id, error)

    def _let_go(self) -> None:
        """Let the model and the optimizer be used by others again."""
        if self._views is not None:
            self._views.release()
        if self._claim is not None:
            self._claim.release()
        if self._averaging is not None:
            self._averaging.averager.close()

    def __enter__(self) -> Run:
        """Close at the end of a ``with`` block."""
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Close, telling the others if an exception ends the block."""
        self.close(error)

    def _flush_trace(self) -> None:
        now = time.monotonic()
        if now >= self._next_flush:
            self._next_flush = now + 1.0
            self.trace.flush()

    def _check_open(self) -> None:
        if self._closed:
            raise UsageError(f"run {self.id} is closed; make a new Run to go on training")

    def _lines(self, mode: str, settings: SyncSettings) -> list[str]:
        lines = [f"optimizer {type(self.optimizer).__name__}, updates {mode}"]
        for number, group in enumerate(self.optimizer.param_groups):
            plain = {k: v for k, v in group.items() if isinstance(v, _PLAIN)}
            lines.append(f"group {number}: {len(group['params'])} parameters, {plain}")
        lines += [f"{k} = {v!r}" for k, v in dataclasses.asdict(settings).items()]
        return lines


def _last_whole_step(run: Run | None) -> int | None:
    """The step whose state a Run has; None in the middle of one."""
    return None if run is None or run._engine.begun else run.step_count
