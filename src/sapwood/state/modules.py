"""What modules keep beside parameters and buffers: ``get_extra_state`` of torch."""

from __future__ import annotations

from typing import Any

from torch import nn

from sapwood.state.packed import EXTRA_STATE
from sapwood.state.tensors import clean_name, unwrap

__all__ = ["EXTRA_STATE", "ExtraState"]


class ExtraState:
    """The extra state of all modules of a model, by the modules' names."""

    may_be_missing = True  # checkpoints of versions that did not save it

    def __init__(self, model: nn.Module) -> None:
        """Find the modules that have some."""
        named = unwrap(model).named_modules()
        self._modules = {clean_name(name): m for name, m in named if _has_some(m)}

    def __bool__(self) -> bool:
        """Whether there is any."""
        return bool(self._modules)

    def state_dict(self) -> dict[str, Any]:
        """What each of them gives."""
        return {name: module.get_extra_state() for name, module in self._modules.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Give each its own back.

        Raises:
            ValueError: it is of other modules.
        """
        if state.keys() != self._modules.keys():
            saved, here = sorted(state), sorted(self._modules)
            raise ValueError(f"modules with extra state were {saved}, and are {here} here")
        for name, module in self._modules.items():
            module.set_extra_state(state[name])


def _has_some(module: nn.Module) -> bool:
    return type(module).get_extra_state is not nn.Module.get_extra_state
