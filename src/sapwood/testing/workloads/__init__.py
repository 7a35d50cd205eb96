"""Seeded models with data they can learn, for tests and benchmarks.

work = workloads.by_name("resnet50", width=0.125, image=32, classes=10)
model = work.model()
inputs, targets = work.batch(step, rank, world)
loss = work.loss(model(inputs), targets)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sapwood.errors import ConfigError
from sapwood.testing.workloads.base import Workload
from sapwood.testing.workloads.convnets import densenet121, resnet50, resnet152
from sapwood.testing.workloads.dense import mlp, nt3
from sapwood.testing.workloads.emulated import emulated
from sapwood.testing.workloads.language import transformer

__all__ = [
    "NAMES",
    "Workload",
    "by_name",
    "densenet121",
    "emulated",
    "mlp",
    "nt3",
    "resnet50",
    "resnet152",
    "transformer",
]

_MAKERS: dict[str, Callable[..., Workload]] = {
    maker.__name__: maker
    for maker in (densenet121, emulated, mlp, nt3, resnet50, resnet152, transformer)
}

NAMES = tuple(_MAKERS)
"""Every workload there is."""


def by_name(name: str, **options: Any) -> Workload:
    """The workload of that name, with its own options (see the function of the same name)."""
    maker = _MAKERS.get(name)
    if maker is None:
        raise ConfigError(f"no workload is called {name!r}; there are {', '.join(NAMES)}")
    try:
        return maker(**options)
    except TypeError as error:
        raise ConfigError(f"workload {name!r}: {error}") from error
