"""A run that began as a fork: from the order in the environment to a state of its own."""

from __future__ import annotations

import hashlib
import logging
import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from sapwood.clone.gate import Gate
from sapwood.clone.order import ForkedFrom, read_order
from sapwood.clone.overrides import apply_overrides
from sapwood.clone.receiver import Receiver
from sapwood.clone.settings import CloneSettings
from sapwood.errors import CloneError, SapwoodError
from sapwood.runtime.group import Group
from sapwood.runtime.handle import RunHandle, run_state
from sapwood.runtime.settings import resolve
from sapwood.state.apply import GivenState, apply_optimizer
from sapwood.state.extras import Extras, Stateful, set_random_state
from sapwood.state.plain import from_plain
from sapwood.state.tensors import named_parameters

__all__ = ["Fork", "join_fork"]

log = logging.getLogger(__name__)


def join_fork(group: Group, model: nn.Module, optimizer: torch.optim.Optimizer) -> Fork | None:
    """Receive the state this process was started to continue; None if it was started as usual.

    Raises:
        CloneError: it cannot be had; nothing of the model can be relied on.
    """
    order = read_order()
    if order is None:
        return None
    settings = resolve(CloneSettings, "clone", {}).value
    receiver = Receiver(order, group, model, optimizer, settings)
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

    def attach(self, run: RunHandle) -> None:
        """Wait until the parent's step has ended; the first forward pass may then begin.

        Raises:
            CloneError: it did not end, or its optimizer is of another kind.
        """
        self._run = run
        assert self._receiver is not None
        self._common, self._mine = self._receiver.extras()
        theirs, ours = len(self._common["groups"]), len(run.optimizer.param_groups)
        if theirs != ours:
            raise CloneError(
                f"the optimizer has {ours} parameter groups, the run to be cloned {theirs}; make "
                "the same groups"
            )
        if not _compiled(run.model):
            self._gate = Gate(run.model, self._receiver.arrival, self.finish, self._timeout)
        else:
            self.finish()  # a compiled model must not wait in its middle
        self.set_random()

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
        if self._gate is not None:
            self._gate.remove()
        try:
            self._become(run, receiver.finish())
        except SapwoodError as error:
            self._failure = error  # whatever comes next must not train on half a state
            raise

    def _become(self, run: RunHandle, state: GivenState) -> None:
        apply_optimizer(named_parameters(run.model), run.optimizer, state)
        for note in Extras(run_state(run), {}).restore(self._known_here(run), {}):
            log.warning("while forking %s: %s", self.forked_from.run, note)
        apply_overrides(self.forked_from.overrides, run.optimizer.param_groups, run.schedulers)

    def restore(self, shared: Mapping[str, Stateful], own: Mapping[str, Stateful]) -> None:
        """Give things of the script the state the parent's had, and random numbers theirs."""
        self.finish()
        here = {name: self._common["shared"].get(name) for name in shared}
        common = {"shared": {name: state for name, state in here.items() if state is not None}}
        for note in Extras(shared, own).restore(common, self._mine):
            log.warning("while forking %s: %s", self.forked_from.run, note)
        self.set_random()

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
        if self._gate is not None:
            self._gate.remove()
        if receiver is not None:
            receiver.abandon(CloneError("it ended before it began"))
        if self._done is not None:
            self._done.join()

    def _known_here(self, run: RunHandle) -> dict[str, Any]:
        """Only what is the run's own: the script's things come with ``allow_clones``."""
        here = run_state(run)
        return {"shared": {n: s for n, s in self._common["shared"].items() if n in here}}


def _compiled(model: nn.Module) -> bool:
    return any(type(module).__name__ == "OptimizedModule" for module in model.modules())
