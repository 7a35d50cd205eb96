"""What a forked step has beside its tensors, taken in two moments.

Most of it when ``run.step()`` ends: random numbers and a position in the data change as soon as the
loop fetches the next batch. But what the loop changes *after* ``run.step()``, an average of the
weights or a scheduler stepped by hand, is complete only when the next step begins. So this is taken
then: before the next forward pass with gradients, or when the run is closed.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import numpy as np
from torch import Tensor

from sapwood.clone.schedules import OF_SCHEDULES, is_scheduler
from sapwood.errors import CloneError, ConfigError
from sapwood.runtime.handle import RunHandle
from sapwood.state.extras import Extras, Stateful, random_state
from sapwood.state.tensors import named_parameters

__all__ = ["CloneExtras", "StepExtras"]

_SET_BY_SCHEDULERS = ("lr", "momentum", "betas", *OF_SCHEDULES)


class CloneExtras(Extras):
    """The extras of a run that takes clones, some of which change after ``run.step()``."""

    def __init__(
        self,
        of_run: Mapping[str, Stateful],
        shared: Mapping[str, Stateful],
        own: Mapping[str, Stateful],
        after_step: Collection[str] | None,
    ) -> None:
        """``of_run`` changes inside ``run.step()``; ``after_step``: None to find out by itself.

        Raises:
            ConfigError: ``after_step`` names what is not there.
        """
        super().__init__({**of_run, **shared}, own)
        self._given = [*shared.items(), *own.items()]
        self._after_step = after_step
        known = {name for name, _ in self._given}
        if isinstance(after_step, str) or not known >= set(after_step or ()):
            raise ConfigError(
                f"after_step is {after_step!r}, expected names of shared or own: "
                f"{', '.join(sorted(known)) or 'there are none'}"
            )

    def late(self, run: RunHandle) -> tuple[set[int], dict[int, Any]]:
        """What the loop changes after ``run.step()``, and the states looked at for it, by ``id``.

        Raises:
            CloneError: something does not give its state.
        """
        late: set[int] = set()
        states: dict[int, Any] = {}
        for name, thing in self._given:
            if self._after_step is not None:
                found = name in self._after_step
            elif is_scheduler(thing, run.optimizer):
                found = True
            else:
                states[id(thing)] = _state_of(name, thing)
                found = _copies_weights(states[id(thing)], run)
            if found:
                late.add(id(thing))
        return late, states


class StepExtras:
    """The extras of one step: made when it ends, completed when the next one begins."""

    def __init__(self, extras: CloneExtras, run: RunHandle, step: int, plain: Any) -> None:
        """Take what changes from now on; ``plain`` is optimizer state that is not tensors.

        Raises:
            SapwoodError: something does not give its state, or one that cannot be sent.
        """
        self._run, self._step = run, step
        self._drawn = random_state()
        self._late, states = extras.late(run)
        groups = run.optimizer.param_groups
        keep = _copied if self._late else _same
        self._shared = self._stand_ins(extras.shared, states, keep)
        self._own = self._stand_ins(extras.own, states, keep)
        self._groups = [keep({k: v for k, v in g.items() if k != "params"}) for g in groups]
        self._plain = keep(plain)
        self._taken: Callable[[], Any] | None = None if self._late else self._take()

    @property
    def complete(self) -> bool:
        """Whether there is nothing to wait for."""
        return self._taken is not None

    def take(self) -> Callable[[], Any]:
        """Everything, in the form ``Extras.take`` gives it.

        Raises:
            SapwoodError: something does not give its state, or one that cannot be sent.
        """
        if self._taken is None:
            for group, now in zip(self._groups, self._run.optimizer.param_groups, strict=True):
                # An optimizer may count in its groups: only what a scheduler sets is newer.
                group.update({k: _copied(now[k]) for k in _SET_BY_SCHEDULERS if k in now})
            self._taken = self._take()
        return self._taken

    def _take(self) -> Callable[[], Any]:
        whole = Extras(self._shared, self._own)
        return whole.take(self._step, self._groups, self._plain, drawn=self._drawn)

    def _stand_ins(
        self,
        things: Mapping[str, Stateful],
        states: Mapping[int, Any],
        keep: Callable[[Any], Any],
    ) -> dict[str, Stateful]:
        """What is late itself, and for all else its state of now, which is asked for once."""
        found: dict[str, Stateful] = {}
        for name, thing in things.items():
            if id(thing) in self._late:
                found[name] = thing
            elif id(thing) in states:
                found[name] = _Past(keep(states[id(thing)]))
            else:
                found[name] = _Past(keep(_state_of(name, thing)))
        return found


def _state_of(name: str, thing: Stateful) -> Any:
    """The state of something of the user's.

    Raises:
        CloneError: it raised, which must end the fork and not the training.
    """
    try:
        return thing.state_dict()
    except Exception as error:
        raise CloneError(
            f"the state of {name} could not be taken: {type(error).__name__}: {error}"
        ) from error


class _Past:
    """Something stateful as it was."""

    def __init__(self, state: Any) -> None:
        self._state = state

    def state_dict(self) -> Any:
        return self._state

    def load_state_dict(self, state_dict: Any, /) -> None:
        raise NotImplementedError("this is a copy of a state, with nothing to give another one to")


def _same(value: Any) -> Any:
    return value


def _copied(value: Any) -> Any:
    """A value that no longer changes, of the kinds that a state may hold."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, (np.ndarray, bytearray, Counter, set)):
        return value.copy()
    if isinstance(value, Mapping):
        return {key: _copied(one) for key, one in value.items()}
    if isinstance(value, deque):
        return deque(map(_copied, value))
    if isinstance(value, list):
        return [_copied(one) for one in value]
    return tuple(map(_copied, value)) if isinstance(value, tuple) else value


def _copies_weights(state: Any, run: RunHandle) -> bool:
    """Whether it has a tensor of the shape of every trained parameter: an average of them."""
    trained = Counter(p.shape for p in named_parameters(run.model).values() if p.requires_grad)
    held = Counter(tensor.shape for tensor in _tensors(state))
    return bool(trained) and trained <= held


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for one in value.values():
            yield from _tensors(one)
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from _tensors(one)
