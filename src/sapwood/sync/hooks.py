"""Hooks of a Run on a module, of which copies do nothing.

``deepcopy(model)`` and ``torch.save(model)`` take a module's hooks along. A copy that kept ours
would drive the engine of the Run with forwards of another model.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch

__all__ = ["ModuleHook"]

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
