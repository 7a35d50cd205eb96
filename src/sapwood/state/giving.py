"""Giving a run back what was saved beside its tensors: all of it, or as little as can be helped.

Everything is decoded first, so that what cannot be read changes nothing. What the user gave may
then still refuse its state, on any rank: what is the run's own comes later, and can be taken back.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from sapwood.errors import CheckpointError
from sapwood.state.plain import from_plain
from sapwood.state.randomness import random_state, set_random_state

if TYPE_CHECKING:
    from sapwood.state.extras import Extras, Stateful

__all__ = ["Giving"]

log = logging.getLogger(__name__)


class Giving:
    """One state on its way to everything it was saved for."""

    def __init__(
        self,
        extras: Extras,
        common: Mapping[str, Any],
        mine: Mapping[str, Any],
        of_run: Collection[str],
    ) -> None:
        """Decode it; ``of_run`` are the names of what is given last, and can be taken back.

        Raises:
            CheckpointError: something cannot be decoded.
        """
        self._users: list[tuple[str, Stateful, Any]] = []
        self._runs: list[tuple[str, Stateful, Any]] = []
        self.notes: list[str] = []
        """What was saved and has nobody to go to, or the other way round."""
        for things, saved in (
            (extras.shared, common.get("shared", {})),
            (extras.own if mine else {}, mine.get("own", {})),
        ):
            for name in (name for name in things if name in saved):
                rows = self._runs if name in of_run and things is extras.shared else self._users
                rows.append((name, things[name], from_plain(saved[name])))
            self.notes += _strangers(things, saved)
        self._random = from_plain(mine["random"]) if mine else None
        if not mine and extras.own:
            self.notes.append("this rank was not part of the saved run: its own state starts anew")
        self._taken: list[str] = []
        self._before: list[tuple[str, Stateful, Any]] = []
        self._random_before: dict[str, Any] | None = None

    def give(self) -> None:
        """Give it all.

        Raises:
            CheckpointError: something did not take its state; then call ``take_back``.
        """
        for name, thing, state in self._users:
            self._taken.append(name)
            _give(name, thing, state)
        for name, thing, state in self._runs:
            self._before.append((name, thing, copy.deepcopy(thing.state_dict())))
            _give(name, thing, state)
        if self._random is not None:
            self._random_before = random_state()
            set_random_state(self._random)

    def take_back(self) -> None:
        """Undo what can be undone, and name the rest: some rank's state was refused."""
        for name, thing, state in self._before:
            try:
                thing.load_state_dict(state)
            except Exception:
                log.exception("%s did not take back the state it had", name)
        if self._random_before is not None:
            set_random_state(self._random_before)
        if self._taken:
            log.warning(
                "a restore failed, but may have changed what was given to be saved beside the run: "
                "%s; give these their state again before you train on",
                ", ".join(self._taken),
            )


def _give(name: str, thing: Stateful, state: Any) -> None:
    try:
        thing.load_state_dict(state)
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise CheckpointError(
            f"{name} did not take its saved state: {type(error).__name__}: {error}"
        ) from error


def _strangers(here: Mapping[str, Stateful], saved: Mapping[str, Any]) -> list[str]:
    missing = [n for n in here if n not in saved and not getattr(here[n], "may_be_missing", False)]
    notes = [f"{name} was not saved and keeps its state" for name in missing]
    return notes + [f"{name} was saved but is not here" for name in saved if name not in here]
