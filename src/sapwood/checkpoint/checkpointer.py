"""Checkpointer: what a user adds to a training loop, in one line.

A step that is due is captured through the run's own events (``saver``), handed to an engine, and
reported as it becomes safe in one tier after the other (``outcomes``).
"""

from __future__ import annotations

import logging
import operator
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, Literal, SupportsIndex

from sapwood.checkpoint.attempts import begin_attempt
from sapwood.checkpoint.branches import Attempt
from sapwood.checkpoint.choose import choose_tiers
from sapwood.checkpoint.engine import Engine, Freed, Progress, start_engine, tiers_to_read
from sapwood.checkpoint.failures import Failures
from sapwood.checkpoint.given import check_callables, check_run, folder_of, metrics_given
from sapwood.checkpoint.inventory import look_around
from sapwood.checkpoint.nodes import find_nodes, find_peers
from sapwood.checkpoint.outcomes import OnDurable, Outcomes
from sapwood.checkpoint.pool import StagingPool
from sapwood.checkpoint.pruner import Pruner
from sapwood.checkpoint.replicas import Comparison
from sapwood.checkpoint.report import CheckpointStats, SaveReport
from sapwood.checkpoint.restore import Loaded, Restored, Wanted, load_newest
from sapwood.checkpoint.retention import Policy, last
from sapwood.checkpoint.saver import Saver
from sapwood.checkpoint.settings import CheckpointSettings, tier_specs
from sapwood.checkpoint.together import on_all_ranks
from sapwood.checkpoint.versions import as_versions, fork_of
from sapwood.errors import CheckpointError, ConfigError
from sapwood.events import RunStopping, StateReplaced, StateReplacing
from sapwood.runtime.ending import AtExit
from sapwood.runtime.handle import RunHandle, run_state, with_run_state
from sapwood.runtime.settings import UNSET, resolve
from sapwood.state.apply import Change, check, prepare
from sapwood.state.catalog import Catalog
from sapwood.state.contents import Contents, collect
from sapwood.state.extras import Extras, Stateful, things_by_name
from sapwood.state.giving import Giving
from sapwood.state.kinds import Kinds
from sapwood.tiers.base import Tier
from sapwood.tiers.make import make_tiers
from sapwood.tiers.record import CheckpointId
from sapwood.tiers.spec import SHARED, TierSpec

__all__ = ["Checkpointer"]

log = logging.getLogger(__name__)
# How much a node's disk must hold for tiers="auto": weights and two states of Adam, four times.
_OPTIMIZER_STATES, _LOCAL_CHECKPOINTS = 3, 4
_LOOK_AROUND = 10.0
"""Seconds a start waits to hear which attempts there were before."""
_LASTING = ("local", *SHARED)
"""Tiers that can be asked which attempts there were without asking other nodes."""


class Checkpointer:
    """Saves and restores a run.

    Args:
        run: the run.
        place: a folder, or ``s3://bucket/prefix``.
        tiers: where checkpoints go, cheapest first, such as ``("memory", "local:/scratch",
            "partner", "parity:4+2", "external")``; by default memory and ``place``. With "auto" a
            short test looks for a fast disk of the node. ``"store://models/"`` makes each one a
            version in a model repository.
        shared: what else to save, by name: anything with ``state_dict`` and ``load_state_dict``
            that is the same on every rank. Schedulers of the run are saved anyway.
        own: the same for what differs from rank to rank, such as a reader's position in the data.
        on_captured: called with the report when this rank's bytes are taken.
        on_durable: called on rank 0 with report and tier when all shards are safe in a tier.
        retention: which checkpoints to keep, in place of ``keep``; see ``checkpoint.retention``.
        every: take a checkpoint every so many steps, or by time, such as "10min".
        settings: any field of ``CheckpointSettings``: mode, overhead, engine, keep, ...
            Each can also come from ``SAPWOOD_CHECKPOINT_<NAME>`` or ``[checkpoint]`` in
            sapwood.toml.

    Attributes:
        metrics: numbers saved with every checkpoint, for ``retention.best``; set them as you go.
        stats: what each checkpoint cost, when it was safe where, and which ones failed, and why.
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
        on_durable: OnDurable | None = None,
        retention: Policy | None = None,
        every: int | str | None = UNSET,
        mode: str = UNSET,
        **settings: Any,
    ) -> None:
        """Start the engine; nothing is saved yet."""
        given = {"every": every, "mode": mode, **settings}
        check_run(run)
        check_callables(on_captured=on_captured, on_durable=on_durable, retention=retention)
        self._extras = Extras(with_run_state(run, shared), things_by_name("own", own))
        self.settings = resolve(CheckpointSettings, "checkpoint", given).value
        self.stats = CheckpointStats()
        self._metrics: dict[str, float] = {}
        self._run = run
        self._closed = False
        place = folder_of(_own_place(run, folder_of(place)))
        self._nodes = find_nodes(run.group)
        if isinstance(tiers, str):
            tiers = self._choose(tiers, place)
        self.specs = as_versions(tier_specs(place, tiers), run, self._nodes)
        self._nodes = find_peers(run.group, self._nodes, self.specs)
        # Also whether replicas are compared: a rank that did not would keep the others waiting.
        mine = f"{secrets.token_hex(6)} {self.settings.check_replicas}"
        name, checks = run.group.share_text("checkpointer", mine).split()
        self.settings = replace(self.settings, check_replicas=checks)  # type: ignore[arg-type]
        leads = self._nodes.ranks[0] == run.group.rank
        self._failures = Failures(self.stats, self.settings.max_failures)
        self._outcomes = Outcomes(run, name, self.stats, self._failures, on_durable, leads=leads)
        self._engine = self._start_engine()
        self._attempt = self._outcomes.attempt = self._first_attempt()
        self._make_pruners(retention, leads=leads)
        single = self.settings.mode == "single"
        self._pool = StagingPool(run, self._engine, single=single)
        compares = run.group.world > 1 and self.settings.check_replicas != "off"
        self._saver = Saver(
            run,
            self.settings,
            self._engine,
            self._pool,
            attempt=self._attempt,
            specs=self.specs,
            extras=self._extras,
            metrics=self._metrics,
            stats=self.stats,
            failures=self._failures,
            comparison=Comparison(run.group, name) if compares else None,
            on_captured=on_captured,
        )
        self._deadline: float | None = None
        self._restoring = False
        self._subscriptions = [
            run.events.subscribe(RunStopping, self._run_stops, name="checkpoint"),
            run.events.subscribe(StateReplacing, self._state_goes, name="checkpoint"),
            run.events.subscribe(StateReplaced, self._state_came, name="checkpoint"),
        ]
        # After the run's own, and so before it: whoever forgets to close loses nothing.
        self._at_exit = AtExit(self.close)
        self._saver.start(self._attempt)

    def _choose(self, wanted: str, place: str | Path) -> Sequence[str]:
        if wanted != "auto":
            raise ConfigError(
                f'tiers is {wanted!r}, expected "auto" or a list such as ["external"]'
            )
        size = sum(t.numel() * t.element_size() for t in self._run.tensors().values())
        need = _OPTIMIZER_STATES * size * _LOCAL_CHECKPOINTS // len(self._nodes.nodes)
        return choose_tiers(self._run.group, self._nodes, place, need)

    def _start_engine(self) -> Engine:
        run = self._run
        engine = start_engine(
            specs=self.specs,
            nodes=self._nodes,
            settings=self.settings,
            listener=self._heard,
            rank=run.group.rank,
            token=run.group.secret("engine"),
            log=run.folder / f"engine-{self._nodes.node}.log",
        )
        if self._nodes.addresses:
            run.group.gather_text("engine", "ready")  # who looks at other nodes finds them
        return engine

    def _first_attempt(self) -> Attempt:
        """Begin after every attempt in the place, also where the clock was set back meanwhile."""
        run = self._run
        if run.group.rank != 0:
            return begin_attempt(run.group, run.id)
        kinds = [spec for spec in self.specs if spec.kind in _LASTING]
        before = look_around(make_tiers(kinds, self._nodes), _LOOK_AROUND)
        return begin_attempt(run.group, run.id, after=before.newest, taken=before.attempts)

    def _heard(self, progress: Progress) -> None:
        if isinstance(progress, Freed):
            self._saver.freed(progress.arena)
        else:
            self._outcomes.heard(progress)

    def _make_pruners(self, retention: Policy | None, *, leads: bool) -> None:
        """For the tiers this rank looks after: its node's, and on rank 0 those all nodes share.

        When one is full, whoever looks after the engine that finds it so may make room.
        """
        if not leads and self.settings.engine != "sync":
            return
        rank = self._run.group.rank
        policy = retention or (None if self.settings.keep is None else last(self.settings.keep))
        pruners = {
            tier.name: Pruner(tier, policy, lambda id, name: self._engine.drop(id, (name,)))
            for tier in make_tiers(self.specs, self._nodes)
            if tier.name != "memory"
        }
        self._outcomes.room_makers = pruners
        mine = {name: p for name, p in pruners.items() if name not in SHARED or not rank}
        self._outcomes.pruners = mine if leads else {}

    @property
    def metrics(self) -> dict[str, float]:
        """Numbers saved with every checkpoint, for ``retention.best``; set them as you go."""
        return self._metrics

    @metrics.setter
    def metrics(self, given: Mapping[str, float]) -> None:
        # Changed in place, as what saves them holds this dictionary.
        found = metrics_given(given)
        self._metrics.clear()
        self._metrics.update(found)

    def save(self, metrics: Mapping[str, float] | None = None) -> SaveReport:
        """Take a checkpoint of the step that has just ended; all ranks must call it.

        Returns when the bytes are captured; ``wait`` waits until they are durable. ``metrics`` are
        added to ``self.metrics`` first. A step that was due is saved already, and only reported:
        with the metrics it had then, and a warning if these are others.

        Raises:
            CheckpointError: no staging memory became free in time, copying failed, or something
                that is to be saved failed to give its state, or gave one that cannot be kept.
        """
        self._check_open()
        self._run.check_between_steps("save()")
        self._run.wait_ready()  # a fork may still be getting its parent's state
        self._metrics.update(metrics_given(metrics))
        report = self._saver.save(self._run.step_count)
        self._saver.say_what_came_late(report)
        self._failures.check()
        return report

    def restore_latest(self, *, optimizer: bool = True) -> Restored | None:
        """Restore the newest whole checkpoint of the current branch, on any number of ranks.

        The branch is that of the attempt that began last; see ``checkpoint.branches``. None if
        there is no checkpoint. Training then goes on as a new attempt.

        Raises:
            CheckpointError: none of the branch is whole, or it is of another model. Nothing of the
                run was changed.
        """
        return self._restore(None, optimizer)

    def restore(self, step: int | str, *, optimizer: bool = True) -> Restored:
        """Restore the checkpoint of a step, or the one of an id such as "00000015-3f9a1c".

        Of several checkpoints of a step, that of the current branch is taken; if the branch has
        none, that of another one, and ``skipped`` says so.

        Raises:
            CheckpointError: it is not there, not whole, or of another model. Nothing of the run
                was changed.
        """
        wanted: Wanted = None
        if isinstance(step, str):
            wanted = CheckpointId.parse(step)
        elif isinstance(step, SupportsIndex) and not isinstance(step, bool):  # numpy's numbers, too
            wanted = operator.index(step)
        if wanted is None:
            raise CheckpointError(
                f"{step!r} is no checkpoint; expected a step, or an id such as '00000015-3f9a1c'"
            )
        restored = self._restore(wanted, optimizer)
        if restored is None:
            what = step if isinstance(step, str) else f"of step {step}"
            raise CheckpointError(f"there is no checkpoint {what}, nor any other")
        return restored

    def _restore(self, wanted: Wanted, optimizer: bool) -> Restored | None:
        self._check_open()
        run = self._run
        run.check_between_steps("restore()")
        run.wait_ready()  # else a fork's state might come over the one that is restored
        # Found once, when it is needed: a model is long to walk.
        contents = cache(lambda: collect(run.model, run.optimizer, lambda name: (0,)))
        with run.trace.span("ckpt_restore"):
            places = on_all_ranks(run.group, "begin to restore", self._places_to_read)
            try:
                loaded = load_newest(
                    run.group,
                    places,
                    wanted=wanted,
                    own=self._attempt,
                    files=() if optimizer else ("model",),
                    accept=lambda catalog, common: self._check(
                        contents(), catalog, common, optimizer
                    ),
                )
            finally:
                for tier in places:
                    tier.close()
            if loaded is None:
                return None
            self._become(loaded, contents(), optimizer)
        return loaded.about

    def _check(
        self, contents: Contents, catalog: Catalog, common: Mapping[str, Any], optimizer: bool
    ) -> None:
        """See that the run can take a state."""
        check(contents, catalog)
        self._kinds(contents).check(common, with_optimizer=optimizer)

    def _kinds(self, contents: Contents) -> Kinds:
        return Kinds(contents.parameters, self._run.optimizer, self._extras.shared)

    def _places_to_read(self) -> list[Tier]:
        """The tiers to restore from, when nothing is on its way there any more."""
        timeout = self.settings.drain_timeout
        if self._run.group.world > 1:
            # Half of what ranks wait for each other: one node's stuck engine must not end the run.
            timeout = min(timeout, self._run.group.timeout / 2)
        deadline = time.monotonic() + timeout
        self._drain(timeout)
        going = StateReplacing()
        self._run.events.publish(going)
        if going.problems:
            raise going.problems[0]
        left = max(0.0, deadline - time.monotonic())
        return tiers_to_read(self._engine, self.specs, self._nodes, timeout=left)

    def _become(self, loaded: Loaded, contents: Contents, optimizer: bool) -> None:
        """Give the run a state, and go on from there as a new attempt."""
        run, about, state = self._run, loaded.about, loaded.state

        def ready() -> tuple[Change, Giving, list[str]]:
            notes = self._kinds(contents).check(state.common, with_optimizer=optimizer)
            change = prepare(contents, run.optimizer, state, with_optimizer=optimizer)
            return change, self._extras.giving(state.common, state.mine, run_state(run)), notes

        change, giving, differing = on_all_ranks(run.group, f"take the state of {about.id}", ready)
        # What is the user's may refuse its state, so it comes before the weights.
        beside = f"what was saved beside the tensors of {about.id}"
        try:
            on_all_ranks(run.group, f"take {beside}", giving.give)
        except BaseException:
            giving.take_back()
            raise
        change.apply()
        for note in (*differing, *giving.notes, *about.skipped):
            log.warning("while restoring %s: %s", about.id, note)
        if self._nodes.addresses and run.group.rank == self._nodes.ranks[0]:
            # Some node may have come back empty, and the next loss may be another one.
            self._engine.mend(about.id)
        self._restoring = True
        try:
            run.resume_at(about.id.step)
        finally:
            self._restoring = False
        known = loaded.branches
        self._attempt = self._outcomes.attempt = begin_attempt(
            run.group,
            run.id,
            restored=about.id,
            lineage=loaded.lineage,
            after=max(known.newest, self._attempt.lineage.began),
            taken={*known.attempts, self._attempt.name},
        )
        self._failures.go_back()
        self._saver.start(self._attempt)

    def _state_goes(self, event: StateReplacing) -> None:
        """Another Checkpointer restores: what is captured behind the training must not see that."""
        try:
            self._saver.drain(self.settings.drain_timeout)
        except Exception as error:
            event.problems.append(error)

    def _state_came(self, event: StateReplaced) -> None:
        """Somebody else has set the run to another state, of which this place knows nothing.

        What is saved from now on does not descend from what was saved here before.
        """
        if self._restoring:
            return
        before = self._attempt
        self._attempt = self._outcomes.attempt = begin_attempt(
            self._run.group, self._run.id, after=before.lineage.began, taken={before.name}
        )
        self._saver.start(self._attempt)

    def wait(self, timeout: float | None = None) -> None:
        """Wait until every checkpoint taken so far is durable in its tiers, or given up.

        Raises:
            CheckpointError: it took longer than ``timeout`` (by default ``drain_timeout``) seconds,
                or more checkpoints in a row have failed than ``max_failures`` allows.
        """
        self._drain(self.settings.drain_timeout if timeout is None else timeout)
        self._saver.check()
        self._failures.check()

    def _drain(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        self._saver.drain(seconds)
        if not self._engine.drain(max(0.0, deadline - time.monotonic())):
            raise CheckpointError(f"checkpoints were still under way after {seconds:g} s")

    def close(self) -> None:
        """Finish what is under way and end the engine; calling it again does nothing.

        Raises:
            CheckpointError: what the next ``run.step()`` would have raised, were there one: more
                checkpoints in a row have failed than ``max_failures`` allows, or replicas differ
                and it has not been told yet. Everything is closed all the same.
        """
        if self._closed:
            return
        self._end()
        self._saver.check_at_close()
        self._failures.check()

    def _end(self) -> None:
        self._closed = True
        self._at_exit.forget()
        for subscription in self._subscriptions:
            subscription.cancel()
        self._saver.close(self._patience())
        self._engine.drain(self._patience())
        # What other nodes still bring here needs this node's engine.
        self._outcomes.close(meet=bool(self._nodes.addresses), timeout=self._patience())
        self._engine.close(self._patience())
        self._pool.close()
        self._saver.say_failure()

    def _run_stops(self, event: RunStopping) -> None:
        """The run ends with this step: save it, and wait until it is durable or time is up.

        Raises:
            CheckpointError: it is not durable anywhere but in memory.
        """
        self._deadline = event.deadline
        report = self._saver.save(event.step, timeout=self._patience(), everywhere=True)
        done = self._engine.drain(self._patience())
        lasting = [tier for tier in report.durable if tier != "memory"]
        if not done or report.failed:
            late = [s.kind for s in self.specs if s.kind not in report.durable]
            log.warning(
                "the run stops before step %d is durable in %s: %s; raise stop_timeout= if there "
                "is time for it",
                event.step,
                ", ".join(late) or "all tiers",
                "; ".join(report.failed.values())
                or "the time to wait is over, and the engine "
                "goes on with it alone as long as it is let",
            )
        event.saved.extend(lasting)
        if not lasting:
            raise CheckpointError(
                f"step {event.step} was not durable in time; if it does not become so, a restart "
                "goes on from the checkpoint before it"
            )

    def _patience(self) -> float:
        """Seconds to wait for what is under way; less once the run stops."""
        if self._deadline is None:
            return self.settings.drain_timeout
        return min(self.settings.drain_timeout, max(0.0, self._deadline - time.monotonic()))

    def __enter__(self) -> Checkpointer:
        """Close at the end of a ``with`` block."""
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        """Close; an exception that ends the block is not replaced by one of closing."""
        if kind is None:
            self.close()
        elif not self._closed:
            self._end()

    def _check_open(self) -> None:
        if self._closed:
            raise CheckpointError("this Checkpointer is closed; make a new one")


def _own_place(run: RunHandle, place: str | Path) -> str | Path:
    """A fork runs its parent's script, and must not take the parent's checkpoints for its own."""
    if run.forked_from is None:
        return place
    own = fork_of(str(place).rstrip("/"), run.id)
    log.info("checkpoints of this fork go to %s", own)
    return own
