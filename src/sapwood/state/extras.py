"""What belongs to a step beside its tensors: counters, random state, schedulers, the user's own."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any, Protocol

from sapwood.errors import CheckpointError, ConfigError
from sapwood.state.copier import Copier
from sapwood.state.giving import Giving
from sapwood.state.packed import MARK, Blob, Packed, pack
from sapwood.state.randomness import random_state

__all__ = ["Extras", "Stateful", "Taking", "things_by_name"]


class Stateful(Protocol):
    """Anything with a state dict: a scheduler, a scaler, a data loader."""

    def state_dict(self) -> Any:
        """Its state, of plain values."""
        ...

    def load_state_dict(self, state_dict: Any, /) -> Any:
        """Take a state over."""
        ...


def things_by_name(argument: str, given: Mapping[str, Any] | None) -> dict[str, Stateful]:
    """What a script wants saved beside tensors, or None for nothing; ``argument`` names it.

    Raises:
        ConfigError: it is no mapping, or holds something that has no state.
    """
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise ConfigError(
            f"{argument} is a {type(given).__name__}, expected things by name, such as "
            f'{argument}={{"data": reader}}'
        )
    for name, thing in given.items():
        if not isinstance(name, str):
            raise ConfigError(f"{argument} has the name {name!r}, expected text")
        for method in ("state_dict", "load_state_dict"):
            if not callable(getattr(thing, method, None)):
                raise ConfigError(
                    f"{argument}[{name!r}] is a {type(thing).__name__}, which has no {method}(); "
                    "give something with state_dict and load_state_dict"
                )
    return dict(given)


class Extras:
    """The stateful things of a run, by name, saved and restored together.

    What all ranks have in common is saved once, by rank 0; random state and the position in the
    data are each rank's own.
    """

    def __init__(self, shared: Mapping[str, Stateful], own: Mapping[str, Stateful]) -> None:
        """``shared`` is the same on every rank; ``own`` differs.

        Raises:
            ConfigError: something has a name that has another meaning in a checkpoint.
        """
        if MARK in {*shared, *own}:
            raise ConfigError(f"{MARK!r} cannot be the name of something to save; use another")
        self.shared = dict(shared)
        self.own = dict(own)

    def take(
        self, step: int, groups: Iterable[Mapping[str, Any]], plain: Any, *, common: bool
    ) -> Callable[[], Packed]:
        """Everything as it is now; call the result, on another thread, to have it encoded.

        ``groups`` are the optimizer's, ``plain`` its state that is not tensors. What all ranks have
        in common is copied where ``common`` is set, and only looked at elsewhere: all ranks refuse
        the same things.

        Raises:
            CheckpointError: something failed to give its state, or gave one that cannot be kept; it
                says which.
        """
        return Taking(self, step, groups, plain, common=common).complete()

    def giving(
        self, common: Mapping[str, Any], mine: Mapping[str, Any], of_run: Collection[str] = ()
    ) -> Giving:
        """A state on its way back; ``mine`` is empty on a rank that was not there.

        ``of_run`` are the names of what of the shared things is the run's own.

        Raises:
            CheckpointError: something cannot be decoded.
        """
        return Giving(self, common, mine, of_run)

    def restore(self, common: Mapping[str, Any], mine: Mapping[str, Any]) -> list[str]:
        """Give everything its state back, as ``giving`` does.

        Returns what was saved and has nobody to go to, or the other way round.
        """
        giving = self.giving(common, mine)
        giving.give()
        return giving.notes


class Taking:
    """The extras of one step, as they are now but for what is late, which ``complete`` takes."""

    def __init__(
        self,
        extras: Extras,
        step: int,
        groups: Iterable[Mapping[str, Any]],
        plain: Any,
        *,
        common: bool,
        late: Collection[int] = (),
        states: Mapping[int, Any] | None = None,
    ) -> None:
        """As ``Extras.take``; ``late`` are the ids of shared or own things that still change.

        ``states`` has, by id, what was asked for its state already.

        Raises:
            CheckpointError: something failed to give its state, or gave one that cannot be kept.
        """
        self._step, self._common = step, common
        self._drawn = random_state()
        self._copier = copier = Copier()
        shared = copier if common else Copier(copies=False)
        self._taken: dict[tuple[str, ...], Any] = {}
        self._late: list[tuple[str, str, Stateful, Copier]] = []
        self._take_options(groups)
        self._taken["optimizer",] = shared.take(dict(plain), "the optimizer's state")
        for section, things, by in (("shared", extras.shared, shared), ("own", extras.own, copier)):
            for name, thing in things.items():
                if id(thing) in late:
                    self._late.append((section, name, thing, by))
                elif states and id(thing) in states:
                    self._taken[section, name] = by.take(states[id(thing)], name)
                else:
                    self._taken[section, name] = _state_of(name, thing, by)

    def complete(
        self, groups: Iterable[Mapping[str, Any]] = (), newer: Collection[str] = ()
    ) -> Callable[[], Packed]:
        """Take what is late, and of the parameter groups the options ``newer``.

        Raises:
            CheckpointError: something failed to give its state, or gave one that cannot be kept.
        """
        self._take_options({k: v for k, v in g.items() if k in newer} for g in groups)
        for section, name, thing, by in self._late:
            self._taken[section, name] = _state_of(name, thing, by)
        blobs, common = self._copier.blobs, self._common
        return lambda: _encoded(self._step, self._drawn, self._taken, blobs, common=common)

    def _take_options(self, groups: Iterable[Mapping[str, Any]]) -> None:
        for number, group in enumerate(groups):
            options = {k: v for k, v in group.items() if k != "params"}
            taken = self._copier.take(options, f"parameter group {number}")
            self._taken.setdefault(("groups", str(number)), {}).update(taken)


def _state_of(name: str, thing: Stateful, copier: Copier) -> Any:
    try:
        return copier.take(thing.state_dict(), name)
    except CheckpointError:
        raise
    except Exception as error:  # it is the user's, and must not end the training
        raise CheckpointError(
            f"the state of {name} could not be taken: {type(error).__name__}: {error}"
        ) from error


def _encoded(
    step: int,
    drawn: Mapping[str, Any],
    taken: Mapping[tuple[str, ...], Any],
    blobs: Iterable[Blob],
    *,
    common: bool,
) -> Packed:
    """What was taken and ``drawn``, the random state, which does not change and could wait."""
    copier = Copier()
    entries: dict[tuple[str, ...], Any] = {}
    for name, state in drawn.items():
        entries["random", name] = copier.take(state, "random state")
    entries |= {path: v for path, v in taken.items() if common or path[0] in ("groups", "own")}
    found = pack(entries, (*copier.blobs, *blobs))
    extras = {"step": step, "optimizer": {}, "shared": {}, "own": {}, **found.extras}
    extras["groups"] = list(extras.get("groups", {}).values())
    return replace(found, extras=extras)
