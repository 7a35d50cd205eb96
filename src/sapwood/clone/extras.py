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
from sapwood.errors import ConfigError
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
        self._given = {**shared, **own}
        self._after_step = after_step
        if isinstance(after_step, str) or not self._given.keys() >= set(after_step or ()):
            raise ConfigError(
                f"after_step is {after_step!r}, expected names of shared or own: "
                f"{', '.join(self._given) or 'there are none'}"
            )

    def late(self, run: RunHandle) -> set[str]:
        """The names of what the loop changes after ``run.step()``."""
        if self._after_step is not None:
            return set(self._after_step)
        return {
            name
            for name, thing in self._given.items()
            if is_scheduler(thing, run.optimizer) or _copies_weights(thing, run)
        }


class StepExtras:
    """The extras of one step: made when it ends, completed when the next one begins."""

    def __init__(self, extras: CloneExtras, run: RunHandle, step: int, plain: Any) -> None:
        """Take what changes from now on; ``plain`` is optimizer state that is not tensors."""
        self._extras, self._run, self._step, self._plain = extras, run, step, plain
        self._late = extras.late(run)
        groups = run.optimizer.param_groups
        if not self._late:
            self._taken: Callable[[], Any] | None = extras.take(step, groups, plain)
            return
        self._taken = None
        self._drawn = random_state()
        self._plain = _copied(plain)
        self._groups = [_copied({k: v for k, v in g.items() if k != "params"}) for g in groups]
        self._shared = self._stand_ins(extras.shared)
        self._own = self._stand_ins(extras.own)

    @property
    def complete(self) -> bool:
        """Whether there is nothing to wait for."""
        return self._taken is not None

    def take(self) -> Callable[[], Any]:
        """Everything, in the form ``Extras.take`` gives it."""
        if self._taken is None:
            for group, now in zip(self._groups, self._run.optimizer.param_groups, strict=True):
                # An optimizer may count in its groups: only what a scheduler sets is newer.
                group.update({k: _copied(now[k]) for k in _SET_BY_SCHEDULERS if k in now})
            whole = Extras(self._shared, self._own)
            self._taken = whole.take(self._step, self._groups, self._plain, drawn=self._drawn)
        return self._taken

    def _stand_ins(self, things: Mapping[str, Stateful]) -> dict[str, Stateful]:
        """What is late itself, and for all else its state of now."""
        return {
            name: thing if name in self._late else _Past(_copied(thing.state_dict()))
            for name, thing in things.items()
        }


class _Past:
    """Something stateful as it was."""

    def __init__(self, state: Any) -> None:
        self._state = state

    def state_dict(self) -> Any:
        return self._state

    def load_state_dict(self, state_dict: Any, /) -> None:
        raise NotImplementedError("this is a copy of a state, with nothing to give another one to")


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


def _copies_weights(thing: Stateful, run: RunHandle) -> bool:
    """Whether it holds a tensor of the shape of every trained parameter: an average of them."""
    trained = Counter(p.shape for p in named_parameters(run.model).values() if p.requires_grad)
    held = Counter(tensor.shape for tensor in _tensors(thing.state_dict()))
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
