"""Where a reader is, and how that is kept in a checkpoint: a few numbers, and nothing of a rank."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from sapwood.data.order import Chunks, OrderSpec
from sapwood.errors import ConfigError

__all__ = ["Position", "from_state", "to_state"]

VERSION = 1
_NONE = -1


@dataclass(frozen=True, kw_only=True)
class Position:
    """The batch that comes next."""

    epoch: int = 0
    batch: int = 0
    until: int | None = 0
    """The epoch before which this pass ends; None is never."""
    origin: int | None = None
    """The batch at which the pass began, counted over epochs, where several workers share it."""

    def after(self, epoch: int, batch: int, batches: int) -> Position:
        """The position after a batch of an epoch that has so many."""
        more = batch + 1 < batches
        return Position(
            epoch=epoch if more else epoch + 1,
            batch=batch + 1 if more else 0,
            until=self.until,
            origin=self.origin,
        )


def to_state(position: Position, spec: OrderSpec, chunks: Chunks) -> dict[str, Any]:
    """Plain numbers and words, for any kind of checkpoint."""
    return {
        "version": VERSION,
        "epoch": position.epoch,
        "batch": position.batch,
        "until": _NONE if position.until is None else position.until,
        "origin": _NONE if position.origin is None else position.origin,
        "order": {**_facts(chunks), **asdict(spec)},
    }


def from_state(state: Mapping[str, Any], spec: OrderSpec, chunks: Chunks) -> Position:
    """The position in the same order; how many ranks there were does not matter.

    Raises:
        ConfigError: it is no such state, or of another order, where the position means nothing.
    """
    try:
        version, kept = int(state["version"]), dict(state["order"])
        numbers = {name: int(state[name]) for name in ("epoch", "batch", "until", "origin")}
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"not the state of a reader: {error!r}") from error
    if version != VERSION:
        raise ConfigError(f"the state has version {version}, expected {VERSION}")
    mine = {**_facts(chunks), **asdict(spec)}
    for name, value in mine.items():
        if kept.get(name) != value:
            what = {"batch": "batch_size", "layout": "the layout of the file"}.get(name, name)
            raise ConfigError(
                f"the state is of another order: {what} was {kept.get(name)!r} and is {value!r}; "
                "make the reader as it was, or begin an epoch with set_epoch"
            )
    return Position(
        epoch=numbers["epoch"],
        batch=numbers["batch"],
        until=None if numbers["until"] == _NONE else numbers["until"],
        origin=None if numbers["origin"] == _NONE else numbers["origin"],
    )


def _facts(chunks: Chunks) -> dict[str, int]:
    """What the order depends on of a database; copies of it have the same."""
    layout = zlib.crc32(chunks.ids.tobytes(), zlib.crc32(chunks.starts.tobytes()))
    return {"records": chunks.count, "chunk": chunks.nbytes, "layout": layout}
