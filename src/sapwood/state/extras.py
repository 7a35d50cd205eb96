"""What belongs to a step beside its tensors: counters, random state, schedulers, the user's own."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

import numpy as np
import torch

from sapwood.errors import CheckpointError
from sapwood.state.plain import from_plain, to_plain

__all__ = ["Extras", "Stateful", "random_state", "set_random_state"]


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

    What all ranks have in common is saved once, by the lowest rank there is; random state and the
    position in the data are each rank's own.
    """

    def __init__(self, shared: Mapping[str, Stateful], own: Mapping[str, Stateful]) -> None:
        """``shared`` is the same on every rank; ``own`` differs."""
        self.shared = dict(shared)
        self.own = dict(own)

    def take(
        self,
        step: int,
        groups: Iterable[Mapping[str, Any]],
        plain: Any,
        *,
        drawn: Mapping[str, Any] | None = None,
    ) -> Callable[[], dict[str, Any]]:
        """Everything as it is now; call the result, at leisure, for the JSON form of it.

        ``groups`` are the optimizer's, ``plain`` its state that is not tensors, ``drawn`` the
        random state if it was taken earlier.
        """
        raw = random_state() if drawn is None else drawn
        taken = {
            "step": step,
            "groups": [
                to_plain({k: v for k, v in g.items() if k != "params"}, f"parameter group {n}")
                for n, g in enumerate(groups)
            ],
            "optimizer": to_plain(plain, "the optimizer's state"),
            "shared": {n: to_plain(s.state_dict(), n) for n, s in self.shared.items()},
            "own": {n: to_plain(s.state_dict(), n) for n, s in self.own.items()},
        }
        return lambda: {**taken, "random": to_plain(raw, "random state")}

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
