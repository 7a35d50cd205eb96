"""Hooks of a Run on parameters, which come last, and on a module, of which copies do nothing.

``deepcopy(model)`` and ``torch.save(model)`` take a module's hooks along. A copy that kept ours
would drive the engine of the Run with forwards of another model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["GradientHooks", "ModuleHook"]

_aside: Callable[[Callable[..., None]], Callable[..., None]] = torch.compiler.disable


class ModuleHook:
    """A module's hook that compilers do not trace into."""

    def __init__(self, call: Callable[..., None]) -> None:
        """``call`` gets what torch gives to the hook."""
        self._call = call

    @_aside
    def __call__(self, *args: Any) -> None:
        """Run it."""
        self._call(*args)

    def __copy__(self) -> ModuleHook:
        """A shallow copy of a module shares its table of hooks as well."""
        return self

    def __deepcopy__(self, memo: object) -> Callable[..., None]:
        """The copy is another model."""
        return _nothing

    def __reduce__(self) -> tuple[Any, ...]:
        """As a callable of the standard library that does nothing: readers may lack Sapwood."""
        return getattr, (nullcontext(), "__exit__")


def _nothing(*args: Any) -> None:
    return None


class GradientHooks:
    """One hook on each parameter, called when its gradient is complete."""

    def __init__(
        self, parameters: Sequence[nn.Parameter], hook: Callable[[int], Callable[[Tensor], None]]
    ) -> None:
        """``hook`` makes the hook of the parameter at a place in ``parameters``."""
        self._on = list(parameters)
        self._handles: list[torch.utils.hooks.RemovableHandle] = [
            parameter.register_post_accumulate_grad_hook(hook(index))  # type: ignore[no-untyped-call]
            for index, parameter in enumerate(parameters)
        ]

    def be_last(self) -> None:
        """A hook registered after ours may change the gradient: ours must see what it leaves."""
        for handle, parameter in zip(self._handles, self._on, strict=True):
            hooks: Any = parameter._post_accumulate_grad_hooks
            if hooks is not None and len(hooks) > 1 and next(reversed(hooks)) != handle.id:
                # Not move_to_end: autograd goes by the order of insertion.
                hooks[handle.id] = hooks.pop(handle.id)

    def remove(self) -> None:
        """Take them off."""
        for handle in self._handles:
            handle.remove()
        self._handles, self._on = [], []
