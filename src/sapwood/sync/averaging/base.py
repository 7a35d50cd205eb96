"""What every way of averaging fulfils."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

__all__ = ["Averager", "BucketMemory", "Pending"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketMemory:
    """Where one bucket's gradients go in, and where their average comes out."""

    contribution: Tensor
    """Flat: this rank's gradients, scaled so that the sum over ranks is the mean."""
    average: Tensor
    """Flat: valid from ``Pending.wait`` until the bucket is launched again. May be the same."""

    @property
    def shared(self) -> bool:
        """Whether other ranks read ``average`` too, so that nobody may write to it."""
        return self.average is not self.contribution


class Pending(Protocol):
    """A bucket on its way."""

    def wait(self) -> None:
        """Wait for the average.

        Raises:
            PeerFailed: a peer failed, died, left, or was silent for the group's timeout.
        """
        ...


class Averager(Protocol):
    """Sums buckets over all ranks. All ranks launch the same buckets in the same order."""

    name: str

    def lay_out(self, sizes: Sequence[tuple[int, torch.dtype]]) -> list[BucketMemory]:
        """Memory for buckets of these lengths, by number; what was laid out before is gone."""
        ...

    def launch(self, bucket: int, what: str) -> Pending:
        """Start to sum a bucket whose contribution is complete; ``what`` names it in errors."""
        ...

    def close(self) -> None:
        """End threads and connections."""
        ...
