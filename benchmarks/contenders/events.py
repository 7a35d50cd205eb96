"""When buckets are updated, and what announcing it costs when nobody listens."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Iterator
from typing import Any

from torch import nn

ANNOUNCE_REPEATS = 200


class EarlyUpdates:
    """Compares the time of each bucket's update with that of the step's last gradient."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.active = False
        self.clear()

    def clear(self) -> None:
        self.events: dict[int, dict[int, tuple[float, Any]]] = {}
        self.gradient_at: list[float] = []

    def updated(self, event: Any) -> None:
        if self.active:
            self.events.setdefault(event.step, {})[event.bucket] = (time.perf_counter(), event)

    def gradient(self, gradient: Any) -> None:
        self.gradient_at.append(time.perf_counter())

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Hooks exist only meanwhile, so that they cost the timed steps nothing.

        They see a gradient before it is accumulated, hence before the engine can act on it.
        """
        self.clear()
        hooks = [
            parameter.register_hook(self.gradient)
            for parameter in self.model.parameters()
            if parameter.requires_grad
        ]
        self.active = True
        try:
            yield
        finally:
            self.active = False
            for hook in hooks:
                hook.remove()

    def shares(self) -> list[tuple[float, float]]:
        """Of each step: the share of buckets, and of bytes, updated before its last gradient."""
        per_step = len(self.gradient_at) // len(self.events)
        if per_step * len(self.events) != len(self.gradient_at):
            raise RuntimeError("steps differ in their number of gradients")
        found = []
        for index, (_, buckets) in enumerate(sorted(self.events.items())):
            last = max(self.gradient_at[index * per_step : (index + 1) * per_step])
            sizes = [(at < last, nbytes(event)) for at, event in buckets.values()]
            early = [size for is_early, size in sizes if is_early]
            found.append((len(early) / len(sizes), sum(early) / sum(size for _, size in sizes)))
        return found

    def last_step(self) -> list[Any]:
        """The events of the last watched step."""
        return [event for _, event in self.events[max(self.events)].values()]


def nbytes(event: Any) -> int:
    """Of the parameters of a bucket."""
    return sum(one.tensor.numel() * one.tensor.element_size() for one in event.tensors)


def announce_seconds(events: list[Any]) -> float:
    """Builds and publishes the events of one step on a bus without subscribers.

    An engine that asks ``wants`` first does less, so this is an upper bound.
    """
    from sapwood.events import EventBus

    bus = EventBus()
    started = time.perf_counter()
    for _ in range(ANNOUNCE_REPEATS):
        for event in events:
            bus.wants(type(event))
            tensors = tuple(dataclasses.replace(tensor) for tensor in event.tensors)
            bus.publish(dataclasses.replace(event, tensors=tensors))
    return (time.perf_counter() - started) / ANNOUNCE_REPEATS
