"""What a forked step has beside its tensors, taken in two moments.

Most of it when ``run.step()`` ends: random numbers and a position in the data change as soon as the
loop fetches the next batch. But what the loop changes *after* ``run.step()``, an average of the
weights or a scheduler stepped by hand, is complete only when the next step begins. So this is taken
then: before the next forward pass with gradients, or when the run is closed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from torch import Tensor

from sapwood.clone.schedules import OF_SCHEDULES, is_scheduler
from sapwood.errors import CloneError, ConfigError
from sapwood.runtime.handle import RunHandle
from sapwood.state.extras import Extras, Stateful, Taking
from sapwood.state.optimizers import check_own_state
from sapwood.state.packed import Packed
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
        """Take what changes from now on; ``plain`` is the rest of the optimizer's state.

        Raises:
            SapwoodError: something does not give its state, or one that cannot be sent.
        """
        self._run = run
        if not any(s is run.optimizer for s in extras.shared.values()):
            check_own_state(run.optimizer)
        late, states = extras.late(run)
        self._taking = Taking(
            extras,
            step,
            run.optimizer.param_groups,
            plain,
            common=run.group.rank == 0,
            late=late,
            states=states,
        )
        self.complete = not late
        """Whether there is nothing to wait for."""

    def take(self) -> Callable[[], Packed]:
        """Everything, in the form ``Extras.take`` gives it.

        Raises:
            SapwoodError: something does not give its state, or one that cannot be sent.
        """
        if self.complete:
            return self._taking.complete()
        # An optimizer may count in its groups: only what a scheduler sets is newer.
        return self._taking.complete(self._run.optimizer.param_groups, _SET_BY_SCHEDULERS)


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
