"""What belongs to a step beside its tensors: counters, random state, schedulers, the user's own."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
import torch

from sapwood.errors import CheckpointError, ConfigError
from sapwood.state.copier import Copier
from sapwood.state.packed import MARK, Blob, Packed, pack
from sapwood.state.plain import from_plain

__all__ = ["Extras", "Stateful", "Taking", "random_state", "set_random_state"]


class Stateful(Protocol):
    """Anything with a state dict: a scheduler, a scaler, a data loader."""

    def state_dict(self) -> Any:
        """Its state, of plain values."""
        ...

    def load_state_dict(self, state_dict: Any, /) -> Any:
        """Take a state over."""
        ...


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

    def restore(self, common: Mapping[str, Any], mine: Mapping[str, Any]) -> list[str]:
        """Give everything its state back; ``mine`` is empty on a rank that was not there.

        Returns what was saved and has nobody to go to, or the other way round.
        """
        notes = _give(self.shared, common.get("shared", {}))
        if mine:
            notes += _give(self.own, mine.get("own", {}))
            set_random_state(from_plain(mine["random"]))
        elif self.own:
            notes.append("this rank was not part of the saved run: its own state starts anew")
        return notes


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
        late: Collection[str] = (),
    ) -> None:
        """As ``Extras.take``; ``late`` are names of shared or own things that still change.

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
                if name in late:
                    self._late.append((section, name, thing, by))
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


def _give(here: Mapping[str, Stateful], saved: Mapping[str, Any]) -> list[str]:
    for name, thing in here.items():
        if name in saved:
            try:
                thing.load_state_dict(from_plain(saved[name]))
            except (KeyError, TypeError, ValueError, RuntimeError) as error:
                raise CheckpointError(
                    f"{name} did not take its saved state: {type(error).__name__}: {error}"
                ) from error
    missing = [n for n in here if n not in saved and not getattr(here[n], "may_be_missing", False)]
    notes = [f"{name} was not saved and keeps its state" for name in missing]
    return notes + [f"{name} was saved but is not here" for name in saved if name not in here]


def random_state() -> dict[str, Any]:
    """The state of every generator a training uses."""
    kind, keys, position, has_gauss, gauss = np.random.get_state()
    state: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": (kind, np.asarray(keys), position, has_gauss, gauss),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def set_random_state(state: Mapping[str, Any]) -> None:
    """The reverse of ``random_state``."""
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.device_count() == len(state["cuda"]):
        torch.cuda.set_rng_state_all(state["cuda"])
