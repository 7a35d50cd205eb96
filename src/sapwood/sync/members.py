"""Which parameters are trained: those the optimizer holds and that want a gradient."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
from torch import nn

from sapwood.errors import ConfigError, UsageError
from sapwood.state.tensors import named_parameters
from sapwood.sync.aliases import check_distinct

__all__ = ["Members", "check_model"]

log = logging.getLogger(__name__)
_Kind = tuple[torch.dtype, torch.device, tuple[int, ...]]
"""What buckets are laid out for."""


class Members:
    """The trained parameters of a model, and whether they are still the same."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Take note of the parameters as they are now."""
        self._model = model
        self._optimizer = optimizer
        self._seen = self._signature()
        self._kinds: dict[str, tuple[nn.Parameter, _Kind]] = {}

    def read(self) -> tuple[list[str], list[nn.Parameter]]:
        """Names and parameters, in registration order.

        Raises:
            ConfigError: the optimizer and the model do not belong together, or parameters share
                memory.
        """
        self._seen = self._signature()
        known = named_parameters(self._model)
        held = _held_by(self._optimizer, {id(p) for p in known.values()})
        trained = {n: p for n, p in known.items() if p.requires_grad and id(p) in held}
        forgotten = [n for n, p in known.items() if p.requires_grad and id(p) not in held]
        if forgotten:
            log.warning(
                "%d parameters want gradients but the optimizer does not hold them, so they are "
                "neither averaged nor updated: %s",
                len(forgotten),
                ", ".join(forgotten[:5]),
            )
        if not trained:
            raise ConfigError(
                "nothing to train: the optimizer holds no parameter of the model with "
                "requires_grad=True"
            )
        check_distinct(trained)
        self.note(list(trained), list(trained.values()))
        return list(trained), list(trained.values())

    def note(self, names: Sequence[str], parameters: Sequence[nn.Parameter]) -> None:
        """These are trained, as they are now."""
        named = zip(names, parameters, strict=True)
        self._kinds = {name: (p, _kind(p)) for name, p in named}

    def converted(self) -> str | None:
        """What to say if ``model.double()``, ``.to(...)`` or the like came after ``read``."""
        for name, (parameter, before) in self._kinds.items():
            now = _kind(parameter)
            if now != before:
                return (
                    f"{name} was {_shown(before)} when the Run was made and is now {_shown(now)}; "
                    "close the Run, convert the model, make its optimizer and then a new Run"
                )
        return None

    def replaced(self) -> str | None:
        """What to say if a trained parameter is no longer part of the model."""
        present = {id(p) for p in self._model.parameters()}
        for name, (parameter, _) in self._kinds.items():
            if id(parameter) not in present:
                return (
                    f"{name} is no longer in the model: a layer was replaced while a Run trains "
                    "it, and the optimizer does not hold the new one; close the Run, change the "
                    "model, make its optimizer and then a new Run"
                )
        return None

    def changed(self) -> bool:
        """Whether parameters were frozen, unfrozen or added to the optimizer since ``read``.

        All of them frozen is no change: another Run trains through this model (a generator through
        its discriminator), and this Run goes on with the same parameters afterwards.
        """
        return not self.frozen() and self._signature() != self._seen

    def unfrozen(self) -> list[str]:
        """Names of parameters that are trained now and were not at the last ``read``."""
        if not self.changed():
            return []
        before = {number for number, trained in self._seen if trained}
        held = {number for number, trained in self._signature() if trained} - before
        return [name for name, p in named_parameters(self._model).items() if id(p) in held]

    def frozen(self) -> bool:
        """Whether every parameter of the optimizer is frozen now."""
        groups = self._optimizer.param_groups
        return not any(p.requires_grad for group in groups for p in group["params"])

    def check_trained(self) -> None:
        """Call at the end of a step.

        Raises:
            UsageError: every parameter is frozen, so that there was nothing to train.
        """
        if self.frozen():
            raise UsageError(
                "run.step() was called while every parameter of its optimizer is frozen, so there "
                "is nothing to train; call requires_grad_(True) before this run's forward, or "
                "leave its run.step() out"
            )

    def _signature(self) -> list[tuple[int, bool]]:
        """What the optimizer holds, and what of it is trained."""
        groups = self._optimizer.param_groups
        return [(id(p), p.requires_grad) for group in groups for p in group["params"]]


def _kind(parameter: nn.Parameter) -> _Kind:
    return parameter.dtype, parameter.device, parameter.stride()


def _shown(kind: _Kind) -> str:
    dtype, device, strides = kind
    return f"{dtype} on {device} with strides {strides}"


def _held_by(optimizer: torch.optim.Optimizer, known: set[int]) -> set[int]:
    held: set[int] = set()
    for number, group in enumerate(optimizer.param_groups):
        for position, parameter in enumerate(group["params"]):
            if id(parameter) not in known:
                raise ConfigError(
                    f"the optimizer's group {number} holds a parameter at position {position}, of "
                    f"shape {tuple(parameter.shape)}, that the model does not have; make the "
                    "optimizer from this model's parameters(), after moving or wrapping the model"
                )
            held.add(id(parameter))
    return held


def check_model(model: nn.Module) -> torch.device:
    """The one device the model is on.

    Raises:
        ConfigError: it is on several, or has no parameters.
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(f"the model is a {type(model).__name__}, expected a torch.nn.Module")
    by_device: dict[torch.device, str] = {}
    for name, parameter in named_parameters(model).items():
        by_device.setdefault(parameter.device, name)
    if not by_device:
        raise ConfigError("the model has no parameters, so there is nothing to train")
    if len(by_device) > 1:
        places = ", ".join(f"{name} on {device}" for device, name in by_device.items())
        raise ConfigError(
            f"the model is on several devices ({places}); a rank trains on one: move the model "
            "with .to(device), or split it over ranks"
        )
    device = next(iter(by_device))
    if device.type == "meta":
        raise ConfigError("the model is on the meta device and has no values; use .to_empty(...)")
    return device
