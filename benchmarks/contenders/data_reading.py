"""What every contender of the data benchmarks is given, and what it must do."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Task:
    """Read one epoch, as one rank of several."""

    folder: Path
    """Holds one folder for each format."""
    count: int
    nbytes: int
    """Of each record."""
    batch: int
    """Of all ranks together."""
    order: str
    rank: int
    world: int
    epoch: int
    """Another epoch is another order."""
    address: tuple[str, int] = ("", 0)
    """Where the group's store listens."""

    @property
    def shuffles(self) -> bool:
        return self.order != "none"

    @property
    def part(self) -> int:
        """Records of a batch for this rank."""
        return max(1, self.batch // self.world)

    @property
    def database(self) -> str:
        return str(self.folder / "lmdb" / "data.mdb")

    @property
    def shards(self) -> list[str]:
        return sorted(str(path) for path in (self.folder / "tar").iterdir())


class Reading(ABC):
    """Made before the clock starts, opens its files after that."""

    format = "lmdb"
    """The folder it reads from."""

    def __init__(self, task: Task) -> None:
        self.task = task

    @abstractmethod
    def batches(self) -> Iterator[Any]:
        """This rank's records of one epoch, in memory of this process.

        What is opened may stay open for the next one.
        """

    def go_on(self) -> None:
        """To the next epoch."""
        self.task = replace(self.task, epoch=self.task.epoch + 1)

    def close(self) -> None:  # noqa: B027 - most have nothing to end
        """End whatever was started."""

    def count(self, batch: Any) -> int:
        return len(batch)

    def records(self, batch: Any) -> Iterable[Any]:
        """The bytes of each record, to be checked."""
        return batch

    def facts(self) -> Mapping[str, float]:
        """Metrics of its own, after an epoch."""
        return {}


class Tensors:
    """For those that put a batch into one tensor, a row for each record."""

    def records(self, batch: Any) -> Iterable[Any]:
        return batch.numpy()
