"""One checkpoint, read from wherever its shards are: any tensor, by any number of ranks."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import ExitStack, closing
from typing import Any

import numpy as np
import numpy.typing as npt

from sapwood.errors import CheckpointError
from sapwood.state.catalog import Catalog, Entry
from sapwood.tiers.base import StoredShard, read_extras, read_range
from sapwood.tiers.record import CheckpointId

__all__ = ["Snapshot"]

Key = tuple[str, str]


class Snapshot:
    """The shards of one checkpoint, opened; every byte that is read is verified."""

    def __init__(self, shards: Mapping[int, StoredShard]) -> None:
        """``shards`` by rank; it closes them. They may be some of the checkpoint's shards only."""
        self.shards = shards
        self._owned = ExitStack()
        for shard in shards.values():
            self._owned.enter_context(closing(shard))
        first = next(iter(shards.values())).record
        self.id: CheckpointId = first.id
        self.world: int = first.world
        self.catalog: Catalog = first.catalog
        for rank, shard in shards.items():
            record = shard.record
            same = (record.id, record.world, record.catalog) == (self.id, self.world, self.catalog)
            if not same or record.rank != rank:
                self.close()
                raise CheckpointError(
                    f"the shards of checkpoint {self.id} do not belong together: shard {rank} is "
                    f"of {record.id}, rank {record.rank} of {record.world}"
                )

    @property
    def missing(self) -> list[int]:
        """Ranks whose shard is not among them."""
        return [rank for rank in range(self.world) if rank not in self.shards]

    def extras(self, rank: int) -> Mapping[str, Any]:
        """What a rank saved beside its tensors, for ``from_plain``; empty if it was not there.

        Raises:
            CheckpointError: it is damaged.
        """
        shard = self.shards.get(rank)
        return {} if shard is None else read_extras(shard)

    def load(self, keys: Collection[Key]) -> dict[Key, npt.NDArray[np.uint8]]:
        """The bytes of these tensors.

        Raises:
            CheckpointError: a shard that holds some of them is missing or damaged.
        """
        wanted = {key: self._entry(key) for key in keys}
        out = {key: np.empty(entry.nbytes, np.uint8) for key, entry in wanted.items()}
        filled = dict.fromkeys(out, 0)
        for shard in self.shards.values():
            for part in shard.record.ranges:
                target = out.get(part.piece.key)
                if target is None:
                    continue
                begin = part.piece.start + part.start
                read_range(shard, part, target[begin : begin + part.nbytes])
                filled[part.piece.key] += part.nbytes
        short = [f"{f} {n}" for (f, n), got in filled.items() if got != wanted[f, n].nbytes]
        if short:
            raise CheckpointError(
                f"checkpoint {self.id} is incomplete: parts of {', '.join(short[:5])} are in the "
                f"shards of ranks {self.missing}, which are not here"
            )
        return out

    def _entry(self, key: Key) -> Entry:
        try:
            return self.catalog.by_key[key]
        except KeyError:
            raise CheckpointError(f"checkpoint {self.id} holds no {key[0]} {key[1]}") from None

    def close(self) -> None:
        """Close the shards."""
        self._owned.close()

    def __enter__(self) -> Snapshot:
        """Close at the end of a ``with`` block."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close."""
        self.close()
