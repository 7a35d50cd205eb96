"""Where a reader is, and how that is kept in a checkpoint: a few numbers, and nothing of a rank."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from sapwood.data.check import require_int
from sapwood.data.order import Chunks, Order, OrderSpec
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
    worker: int = 0
    """Which of ``workers`` it is the position of: each has passed only its own batches."""
    workers: int = 1

    def after(self, epoch: int, batch: int, batches: int) -> Position:
        """The position after a batch of an epoch that has so many."""
        more = batch + 1 < batches
        return replace(self, epoch=epoch + (not more), batch=batch + 1 if more else 0)

    def begun(self, epochs: int | None) -> Position:
        """Where a loop of so many epochs begins; one that was left is gone on with."""
        if self.until is None or self.until > self.epoch:
            return self
        return replace(self, until=None if epochs is None else self.epoch + epochs)


def to_state(
    position: Position, spec: OrderSpec, chunks: Chunks, epochs: int | None
) -> dict[str, Any]:
    """Plain numbers and words, for any kind of checkpoint."""
    return {
        "version": VERSION,
        "epoch": position.epoch,
        "batch": position.batch,
        "until": _NONE if position.until is None else position.until,
        "origin": _NONE if position.origin is None else position.origin,
        "epochs": _NONE if epochs is None else epochs,
        "worker": position.worker,
        "workers": position.workers,
        "order": {**_facts(chunks), **asdict(spec)},
    }


def from_state(state: object, order: Order, chunks: Chunks, epochs: int | None) -> Position:
    """The position in the same order; how many ranks there were does not matter.

    Raises:
        ConfigError: it is no such state, or of another order, where the position means nothing.
    """
    if not isinstance(state, Mapping):
        raise ConfigError(
            f"not the state of a reader: expected what state_dict() gave, found a "
            f"{type(state).__name__}"
        )
    try:
        version, kept = require_int("version", state["version"]), dict(state["order"])
        numbers = {
            name: require_int(name, state[name], least=least)
            for name, least in (("epoch", 0), ("batch", 0), ("until", _NONE), ("origin", _NONE))
        }
        # A state of an older release does not say of how many workers it is one's.
        unknown = 1 if numbers["origin"] == _NONE else 0
        workers = require_int("workers", state.get("workers", unknown), least=0)
        worker = require_int("worker", state.get("worker", 0), least=0)
        now = _NONE if epochs is None else epochs
        before = require_int("epochs", state.get("epochs", now), least=_NONE)
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"not the state of a reader: {error!r}") from error
    if version != VERSION:
        raise ConfigError(f"the state has version {version}, expected {VERSION}")
    _same_order(kept, {**_facts(chunks), **asdict(order.spec)})
    if numbers["batch"] >= order.batches:
        raise ConfigError(
            f"not the state of a reader: batch={numbers['batch']}, and an epoch has {order.batches}"
        )
    until = _until(numbers["epoch"], numbers["until"], before, now)
    return Position(
        epoch=numbers["epoch"],
        batch=numbers["batch"],
        until=None if until == _NONE else until,
        origin=None if numbers["origin"] == _NONE else numbers["origin"],
        worker=worker,
        workers=workers,
    )


def _until(epoch: int, until: int, before: int, now: int) -> int:
    """Where the loop ends that is gone on with, if the reader has other ``epochs`` by now.

    It is as long as it would be had it begun with these, but for the epoch it is in.
    """
    if before == now or _NONE != until <= epoch:  # the last loop has ended: a new one begins
        return until
    if now == _NONE:
        return _NONE
    return epoch + now if before == _NONE else max(until - before + now, epoch + 1)


def _same_order(kept: Mapping[str, Any], mine: Mapping[str, Any]) -> None:
    for name, value in mine.items():
        if kept.get(name) != value:
            what = {"batch": "batch_size", "layout": "the layout of the file"}.get(name, name)
            raise ConfigError(
                f"the state is of another order: {what} was {kept.get(name)!r} and is {value!r}; "
                "make the reader as it was, or begin an epoch with set_epoch"
            )


def _facts(chunks: Chunks) -> dict[str, int]:
    """What the order depends on of a database; copies of it have the same."""
    layout = zlib.crc32(chunks.ids.tobytes(), zlib.crc32(chunks.starts.tobytes()))
    return {"records": chunks.count, "chunk": chunks.nbytes, "layout": layout}
