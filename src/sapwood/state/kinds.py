"""Which optimizer, groups and schedulers a state is of, and whether a run has the same.

A state is given back by name. One of another class has other names in it, or the same names with
another meaning, and neither torch nor the class itself would notice.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from sapwood.errors import CheckpointError

__all__ = ["Kinds", "check_group_count", "group_members", "name_of", "name_of_scheduler"]

_CLASS, _GROUPS, _SCHEDULERS = "optimizer_class", "optimizer_groups", "scheduler_classes"
_MODULES = re.compile(r"[\w<>.]+\.")
_SHOWN = 5
_NONE = -1
"""In place of a group's number: the optimizer does not hold the parameter."""


def name_of(kind: type) -> str:
    """A class by the name it is known under."""
    if kind.__module__.startswith("torch.optim.") and hasattr(torch.optim, kind.__name__):
        return f"torch.optim.{kind.__name__}"
    return f"{kind.__module__}.{kind.__qualname__}"


def name_of_scheduler(scheduler: Any) -> str:
    """A scheduler's class, with those of the schedulers inside it."""
    inner = ", ".join(name_of_scheduler(one) for one in getattr(scheduler, "_schedulers", ()))
    kind = name_of(type(scheduler))
    return f"{kind}({inner})" if inner else kind


def group_members(
    parameters: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer
) -> list[list[str]]:
    """The names of the parameters in each of the optimizer's groups."""
    names = {id(parameter): name for name, parameter in parameters.items()}
    return [
        [names[id(p)] for p in group["params"] if id(p) in names]
        for group in optimizer.param_groups
    ]


def check_group_count(optimizer: torch.optim.Optimizer, saved: int) -> None:
    """See that there are as many parameter groups as were saved.

    Raises:
        CheckpointError: there are not.
    """
    here = len(optimizer.param_groups)
    if saved != here:
        raise CheckpointError(
            f"the optimizer has {here} parameter groups, the checkpoint {saved}; make the same "
            "groups, or restore with optimizer=False"
        )


class Kinds:
    """What kinds of things a run trains with, to be saved and to be compared with what was."""

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        optimizer: torch.optim.Optimizer,
        things: Mapping[str, Any],
    ) -> None:
        """``parameters`` are the model's by name, ``things`` what is saved beside tensors."""
        self._optimizer = optimizer
        self._members = group_members(parameters, optimizer)
        self._names = sorted(parameters)
        # A class of the user's own may move to another module and stay the same.
        self._schedulers = {
            name: _MODULES.sub("", name_of_scheduler(thing))
            for name, thing in things.items()
            if isinstance(thing, LRScheduler)
        }

    def to_json(self) -> dict[str, Any]:
        """For a checkpoint's record; small, since everybody who looks at one reads that."""
        found: dict[str, Any] = {_CLASS: type(self._optimizer).__name__}
        numbers = self._numbers()
        if any(numbers):
            found[_GROUPS] = numbers
        if self._schedulers:
            found[_SCHEDULERS] = self._schedulers
        return found

    def check(self, common: Mapping[str, Any], *, with_optimizer: bool) -> list[str]:
        """Compare with the record of a state.

        Returns what differs and is no reason to refuse it.

        Raises:
            CheckpointError: the state would mean something else here.
        """
        notes = []
        if with_optimizer:
            older = _CLASS not in common  # it recorded nothing of what is compared here
            if not older:
                self._check_class(common[_CLASS])
            check_group_count(self._optimizer, len(common.get("groups", ())))
            notes = [] if older else self._check_members(common.get(_GROUPS))
        self._check_schedulers(common.get(_SCHEDULERS, {}))
        return notes

    def _numbers(self) -> list[int]:
        group_of = {name: n for n, names in enumerate(self._members) for name in names}
        return [group_of.get(name, _NONE) for name in self._names]

    def _check_class(self, saved: str) -> None:
        kind = type(self._optimizer)
        if saved == kind.__name__:
            return
        # torch's own AdamW is a subclass of Adam, and another algorithm.
        own = not kind.__module__.startswith("torch.optim.")
        if own and any(base.__name__ == saved for base in kind.__mro__):
            return
        raise CheckpointError(
            f"the optimizer is {kind.__name__}, the checkpoint's {saved}, whose state would mean "
            f"something else; use {saved}, or restore with optimizer=False"
        )

    def _check_members(self, numbers: Sequence[int] | None) -> list[str]:
        here = self._numbers()
        numbers = [0] * len(here) if numbers is None else numbers
        if len(numbers) != len(here):
            return []  # a buffer became a parameter, so names and numbers do not match
        pairs = list(zip(self._names, here, numbers, strict=True))
        moved = [
            f"{name} is in group {now}, in the checkpoint in group {then}"
            for name, now, then in pairs
            if now != then and _NONE not in (now, then)
        ]
        if moved:
            raise CheckpointError(
                f"the optimizer's parameter groups are not the checkpoint's: {_some(moved, '; ')}; "
                "make the same groups, whose options come from the checkpoint, or restore with "
                "optimizer=False"
            )
        new = [name for name, now, then in pairs if then == _NONE != now]
        gone = [name for name, now, then in pairs if now == _NONE != then]
        return [
            f"{len(names)} {text}: {_some(names, ', ')}"
            for names, text in (
                (new, "parameters were not in the saved optimizer and begin without a state"),
                (gone, "parameters are not in the optimizer, what it had saved of them is dropped"),
            )
            if names
        ]

    def _check_schedulers(self, saved: Mapping[str, str]) -> None:
        for name, kind in self._schedulers.items():
            if saved.get(name, kind) != kind:
                raise CheckpointError(
                    f"{name} is a {kind}, the checkpoint's a {saved[name]}, whose state would mean "
                    f"something else; make the same scheduler, or leave it out of schedulers=, "
                    'step it yourself and save it under a new name, as shared={"new": scheduler}'
                )


def _some(lines: Sequence[str], between: str) -> str:
    more = f", and {len(lines) - _SHOWN} more" if len(lines) > _SHOWN else ""
    return between.join(lines[:_SHOWN]) + more
