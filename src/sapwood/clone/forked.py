"""A run that began as a fork: from the order in the environment to a state of its own."""

from __future__ import annotations

import hashlib
import logging
import random
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from sapwood.clone import schedules
from sapwood.clone.gate import Gate
from sapwood.clone.kinds import check_kinds
from sapwood.clone.options import check_changes
from sapwood.clone.order import ForkedFrom, order_failed, order_used, read_order, used_by
from sapwood.clone.overrides import (
    apply_overrides,
    changes_by_group,
    check_overrides,
    rate_factors,
)
from sapwood.clone.receiver import Receiver
from sapwood.clone.settings import CloneSettings
from sapwood.errors import CloneError, ConfigError, SapwoodError
from sapwood.events import BackwardBegan, StepEnded, Subscription
from sapwood.runtime.group import Group
from sapwood.runtime.handle import RunHandle, run_state
from sapwood.runtime.settings import resolve
from sapwood.state.apply import GivenState, apply_groups, apply_optimizer
from sapwood.state.extras import Extras, Stateful
from sapwood.state.plain import from_plain
from sapwood.state.randomness import set_random_state
from sapwood.state.tensors import named_parameters

__all__ = ["Fork", "join_fork"]

log = logging.getLogger(__name__)
OWNER = "fork"


def join_fork(
    group: Group, model: nn.Module, optimizer: torch.optim.Optimizer, schedulers: Sequence[Any]
) -> Fork | None:
    """Receive the state this process was started to continue; None if it was started as usual.

    The first Run of a process that comes to its parent's state uses the order up.

    Raises:
        ConfigError: what shall be different cannot be; nobody has been asked for anything.
        CloneError: it cannot be had; nothing of the model can be relied on.
    """
    order = read_order()
    if order is None:
        if used_by() and group.rank == 0:
            log.warning(
                "this process was started by `sapwood fork`, and its run %s goes on from the "
                "parent's state; this Run is not a fork, and starts with what its model holds",
                used_by(),
            )
        return None
    check_overrides(order.overrides, optimizer, schedulers)
    settings = resolve(CloneSettings, "clone", {}).value
    receiver = Receiver(
        order,
        group,
        model,
        optimizer,
        settings,
        check=lambda manifest: check_kinds(manifest, model, optimizer, schedulers),
    )
    return Fork(receiver, group, settings)


class Fork:
    """What a forked run still has to do, and then what it knows of its parent."""

    def __init__(
        self,
        receiver: Receiver,
        group: Group,
        settings: CloneSettings,
    ) -> None:
        """``receiver`` is getting the parent's state."""
        self.forked_from: ForkedFrom = receiver.forked_from
        self._receiver: Receiver | None = receiver
        self._done: Receiver | None = None
        self._common: Any = {}
        self._mine: Any = {}
        self._rank = group.rank
        self._timeout = settings.step_timeout
        self._gate: Gate | None = None
        self._failure: SapwoodError | None = None
        self._run: RunHandle | None = None
        self._factors: list[float | None] | None = None
        self._schedules = False
        """Whether a scheduler is known that sets the learning rates."""
        self._asked: set[str] = set()
        self._restored = False
        """Whether the script has asked for the state of its own things."""
        self._first_step: Subscription | None = None
        self._first_gradient: Subscription | None = None

    def attach(self, run: RunHandle) -> None:
        """Wait until the parent's step has ended; the first forward pass may then begin.

        Raises:
            ConfigError: what shall be different cannot be, with the state of this step.
            CloneError: it did not end, or its optimizer is of another kind.
        """
        self._run = run
        assert self._receiver is not None
        try:
            self._common, self._mine = self._receiver.extras()
            self._check(run)
            self._take_beside(run)
        except SapwoodError as error:
            self._give_up(error)
            raise
        if self._receiver.streams and not _compiled(run.model):
            self._gate = Gate(run.model, self._receiver.arrival, self.finish, self._timeout)
            # Without a forward of the whole model, the gate does not see the end of the first pass,
            # and updates during backward would be made without the optimizer's state.
            self._first_gradient = run.events.subscribe(
                BackwardBegan, lambda _: self.finish(), name=OWNER
            )
        else:
            # A compiled model must not wait in its middle, and a file is read at once.
            self.finish()
        self.set_random()
        order_used(run.id)
        self._first_step = run.events.subscribe(StepEnded, self._first_step_ended, name=OWNER)

    def _check(self, run: RunHandle) -> None:
        """Before the clones commit themselves: what only the forked step's state can tell."""
        theirs, ours = len(self._common["groups"]), len(run.optimizer.param_groups)
        if theirs != ours:
            raise CloneError(
                f"the optimizer has {ours} parameter groups, the run to be cloned {theirs}; make "
                "the same groups"
            )
        overrides = self.forked_from.overrides
        parents = [from_plain(group) for group in self._common["groups"]]
        check_changes(changes_by_group(overrides, parents), run.optimizer, parents)
        self._factors = rate_factors(overrides, parents)
        self._schedules = bool(run.schedulers)
        for number, scheduler in enumerate(run.schedulers):
            saved = self._common["shared"].get(f"scheduler {number}")
            state = None if saved is None else from_plain(saved)
            schedules.check(scheduler, state, self._factors)

    def _give_up(self, error: SapwoodError) -> None:
        """Tell donors and other clones why there is no fork."""
        receiver, self._receiver = self._receiver, None
        self._failure = error
        order_failed()
        if receiver is not None:
            receiver.abandon(error)

    def finish(self) -> None:
        """Wait until the whole state is there and verified; calling it again does nothing.

        Raises:
            CloneError: it did not arrive; this run cannot begin.
        """
        if self._failure is not None:
            raise CloneError(str(self._failure)) from self._failure
        receiver, run = self._receiver, self._run
        if receiver is None or run is None:
            return
        self._receiver, self._done = None, receiver
        self._let_go()
        try:
            self._become(run, receiver.finish())
        except SapwoodError as error:
            self._failure = error  # whatever comes next must not train on half a state
            order_failed()
            raise

    def _let_go(self) -> None:
        """Nothing of the first forward pass has to wait any more."""
        if self._gate is not None:
            self._gate.remove()
        if self._first_gradient is not None:
            self._first_gradient.cancel()

    def _take_beside(self, run: RunHandle) -> None:
        """Take over what is no tensor, before a loop sets a rate, or a forward pass counts."""
        apply_groups(run.optimizer, self._common)
        for note in Extras(run_state(run), {}).restore(self._known_here(run), {}):
            log.warning("while forking %s: %s", self.forked_from.run, note)
        apply_overrides(self.forked_from.overrides, run.optimizer, run.schedulers)

    def _become(self, run: RunHandle, state: GivenState) -> None:
        apply_optimizer(named_parameters(run.model), run.optimizer, state)

    def restore(self, shared: Mapping[str, Stateful], own: Mapping[str, Stateful]) -> None:
        """Give things of the script the state the parent's had, and random numbers theirs.

        Raises:
            ConfigError: one of them is a scheduler that cannot go on relative to a new rate.
        """
        by_hand = self._schedulers_among(shared, own)
        self.finish()
        self._restored = True
        theirs = self._common["shared"]
        named = {name: theirs[name] for name in shared if name in theirs}
        # Also what has nobody to go to here: that is said.
        common = {"shared": {**self._shared_by_script(), **named}}
        for note in Extras(shared, own).restore(common, self._mine):
            log.warning("while forking %s: %s", self.forked_from.run, note)
        if self._factors is not None and self._run is not None:
            for scheduler in by_hand:
                schedules.scale(scheduler, self._factors, self._run.optimizer.param_groups)
        self.set_random()

    def _schedulers_among(
        self, shared: Mapping[str, Stateful], own: Mapping[str, Stateful]
    ) -> list[Any]:
        """Schedulers that the script steps itself, checked; if they can be, before the commit."""
        run, found = self._run, []
        assert run is not None
        saved = {**self._mine.get("own", {}), **self._common["shared"]}
        for name, thing in {**own, **shared}.items():
            if not schedules.is_scheduler(thing, run.optimizer):
                continue
            found.append(thing)
            self._schedules = True
            try:
                if self._factors is not None and name not in saved:
                    raise ConfigError(
                        f"optimizer.lr: the scheduler {name!r} is not part of what the parent "
                        "shares, so it begins anew and would undo the new rate; give it to the "
                        "parent's allow_clones too"
                    )
                schedules.check(thing, from_plain(saved.get(name)), self._factors)
            except ConfigError as error:
                self._give_up(error)
                raise
        return found

    def override(self, path: str, default: Any) -> Any:
        """What was asked to be different at ``path``, or the default."""
        self._asked.add(path)
        return self.forked_from.overrides.get(path, default)

    def _first_step_ended(self, event: StepEnded) -> None:
        """Say what was asked for and has, as far as can be seen, not been done."""
        assert self._first_step is not None
        self._first_step.cancel()
        run = self._run
        if self._rank != 0 or run is None:
            return
        paths = [path for path in self.forked_from.overrides if path.split(".")[0] != "optimizer"]
        for path in paths:
            if path not in self._asked:
                log.warning(
                    "--set %s=... has changed nothing so far: the script has not asked for it with "
                    "run.override(%r, ...) by the end of its first step; is it misspelt?",
                    path,
                    path,
                )
        lost = sorted([*self._shared_by_script(), *self._mine.get("own", {})])
        if lost and not self._restored:
            log.warning(
                "the parent's %s came with the fork and went to nothing: the script has not called "
                "run.allow_clones(shared=..., own=...) with it by the end of its first step",
                ", ".join(repr(name) for name in lost),
            )
        if self._factors is not None and not self._schedules and _scheduled(run.optimizer):
            log.warning(
                "optimizer.lr was changed, but a scheduler was made for this optimizer that this "
                "Run does not know, and that may set the old rate again: give it to "
                "Run(schedulers=...) or to allow_clones(shared=...), in the parent too"
            )

    def set_random(self) -> None:
        """Random numbers go on as the parent's; a rank it does not have draws its own."""
        if self._mine:
            set_random_state(from_plain(self._mine["random"]))
            return
        text = f"{self.forked_from.run} {self.forked_from.step} {self._rank}"
        seed = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "big")
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)

    def abandon(self) -> None:
        """The run ends, perhaps before it has begun."""
        receiver, self._receiver = self._receiver, None
        self._let_go()
        if receiver is not None:
            receiver.abandon(CloneError("it ended before it began"))
        if self._done is not None:
            self._done.join()

    def _shared_by_script(self) -> dict[str, Any]:
        """What the parent shares beside what is a run's own; schedulers were looked at before."""
        assert self._run is not None
        of_run = run_state(self._run)
        return {
            name: state
            for name, state in self._common["shared"].items()
            if name not in of_run and not re.fullmatch(r"scheduler \d+", name)
        }

    def _known_here(self, run: RunHandle) -> dict[str, Any]:
        """Only what is the run's own: the script's things come with ``allow_clones``."""
        here = run_state(run)
        return {"shared": {n: s for n, s in self._common["shared"].items() if n in here}}


def _compiled(model: nn.Module) -> bool:
    return any(type(module).__name__ == "OptimizedModule" for module in model.modules())


def _scheduled(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a scheduler of torch's was made for this optimizer; it leaves this mark."""
    return hasattr(optimizer.step, "_wrapped_by_lr_sched")
