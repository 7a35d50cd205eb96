"""Sapwood: the layer of a training run that moves things.

Importing this package has no side effect and does not import torch: names are loaded when used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from sapwood._version import __version__

if TYPE_CHECKING:
    from sapwood import data, store
    from sapwood.checkpoint.checkpointer import Checkpointer
    from sapwood.errors import SapwoodError
    from sapwood.events import BuffersUpdated, PlanChanged, RunStopping, StepEnded, TensorUpdated
    from sapwood.run import Run
    from sapwood.runtime.stopped import Stopped

_HOME = {
    "BuffersUpdated": "sapwood.events",
    "Checkpointer": "sapwood.checkpoint.checkpointer",
    "PlanChanged": "sapwood.events",
    "Run": "sapwood.run",
    "RunStopping": "sapwood.events",
    "SapwoodError": "sapwood.errors",
    "StepEnded": "sapwood.events",
    "Stopped": "sapwood.runtime.stopped",
    "TensorUpdated": "sapwood.events",
}
_PACKAGES = ("data", "store")
"""Packages that need no import of their own."""

__all__ = [
    "BuffersUpdated",
    "Checkpointer",
    "PlanChanged",
    "Run",
    "RunStopping",
    "SapwoodError",
    "StepEnded",
    "Stopped",
    "TensorUpdated",
    "__version__",
    "data",
    "store",
]


def __getattr__(name: str) -> Any:
    if name in _PACKAGES:
        return import_module(f"sapwood.{name}")
    if name not in _HOME:
        raise AttributeError(f"module 'sapwood' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
