"""Sapwood's model repository: on a provider of this machine, or embedded in the process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

import sapwood.store

from .store_ways import Way, touch

__all__ = ["Ours"]


class Ours(Way):
    """``place`` is what ``sapwood.store.open`` gets."""

    def __init__(self, folder: Path, durability: str, place: str, **options: Any) -> None:
        super().__init__(folder, durability)
        # A file system in memory promises what a disk does, as far as anybody can tell.
        promised = "written" if durability == "memory" and not options else durability
        self.repo = sapwood.store.open(place, durability=promised, **options)

    def save(self, name: str, tensors: Mapping[str, Tensor]) -> None:
        self.repo.save(dict(tensors), f"{name}@1")

    def load(self, name: str, out: Mapping[str, Tensor]) -> None:
        self.repo.load(f"{name}@1", into=out, layers=list(out))

    def attach(self, name: str, names: Sequence[str]) -> int:
        found = self.repo.load(f"{name}@1", layers=list(names))
        return sum(touch(found[key]) for key in names)

    def remove(self, name: str) -> None:
        self.repo.remove(f"{name}@1")
        self.repo.gc(quiet=0)

    def settle(self) -> None:
        self.repo.flush()

    def stored(self) -> int:
        return sum(record.nbytes for record in self.repo.models())

    def close(self) -> None:
        self.repo.close()
