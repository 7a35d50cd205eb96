"""What a workload is: a model, data it can learn, and a loss, all fixed by a seed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sapwood.errors import ConfigError

__all__ = ["Batch", "Classes", "Data", "Workload", "cross_entropy"]

Batch = tuple[Tensor, Tensor]
Data = Callable[[int, int, int], Batch]
"""From (seed of the task, seed of the batch, batch size) to a batch."""

_MANY_STEPS = 1 << 20
_MANY_RANKS = 1 << 16


def cross_entropy(output: Tensor, target: Tensor) -> Tensor:
    """The mean over all positions, however many dimensions come before the classes."""
    return F.cross_entropy(output.flatten(0, -2), target.flatten())


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A training task that is the same on every machine, in every process and in every run.

    ``batch_size`` is per rank. A rank's batch depends on the seed, the step and the rank alone, so
    ``global_batch`` is exactly what all ranks see together: a plain single process can train on it
    as the reference.
    """

    name: str
    build: Callable[[], nn.Module]
    data: Data
    batch_size: int
    seed: int = 0
    criterion: Callable[[Tensor, Tensor], Tensor] = cross_entropy

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise ConfigError(f"{self.name}: batch_size={self.batch_size}, expected at least 1")

    def model(self) -> nn.Module:
        """A new model with the weights the seed says; the global random state is left alone."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            return self.build()

    def batch(self, step: int, rank: int = 0, world: int = 1) -> Batch:
        """The inputs and targets of one rank at one step."""
        if not 0 <= rank < world:
            raise ConfigError(f"{self.name}: rank={rank} is not in a group of {world}")
        number = (self.seed * _MANY_STEPS + step) * _MANY_RANKS + rank + 1
        return self.data(self.seed, number, self.batch_size)

    def global_batch(self, step: int, world: int) -> Batch:
        """The batches of all ranks at one step, in rank order."""
        inputs, targets = zip(*(self.batch(step, one, world) for one in range(world)), strict=True)
        return torch.cat(inputs), torch.cat(targets)

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        """The loss to train on, a mean over the batch."""
        return self.criterion(output, target)

    @cached_property
    def parameters(self) -> int:
        """How many parameters the model has, shared ones counted once."""
        return sum(one.numel() for one in self._empty_model().parameters())

    @cached_property
    def parameter_bytes(self) -> int:
        """How many bytes those parameters have."""
        return sum(one.numel() * one.element_size() for one in self._empty_model().parameters())

    def _empty_model(self) -> nn.Module:
        with torch.device("meta"):
            return self.build()


@dataclass(frozen=True, kw_only=True)
class Classes:
    """Data with a pattern per class, under noise: a model learns it in a few dozen steps.

    ``coarse`` is the shape of the random pattern; it is stretched to ``shape``, so that pooling and
    strides do not wash it out.
    """

    classes: int
    shape: tuple[int, ...]
    coarse: tuple[int, ...]
    noise: float = 0.5

    def __call__(self, task: int, number: int, size: int) -> Batch:
        """A batch, by the seed of the patterns and the seed of the samples."""
        patterns = torch.randn((self.classes, *self.coarse), generator=generator(task))
        chance = generator(number)
        target = torch.randint(self.classes, (size,), generator=chance)
        inputs = patterns[target]
        if self.coarse != self.shape:
            inputs = F.interpolate(inputs, size=self.shape[1:], mode="nearest")
        return inputs + self.noise * torch.randn(inputs.shape, generator=chance), target


def generator(seed: int) -> torch.Generator:
    """A random generator of its own."""
    return torch.Generator(device="cpu").manual_seed(seed % (1 << 63))
