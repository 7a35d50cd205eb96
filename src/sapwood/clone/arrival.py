"""The memory a state arrives in, and knowing which tensors are complete.

Tensors of the model arrive in their own memory where that is possible; the optimizer's, which a
fresh run does not have yet, in memory that later becomes its state.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sapwood.buffers.fresh import fresh_memory
from sapwood.clone.plan import Key, Message
from sapwood.errors import CloneError
from sapwood.state.catalog import Catalog
from sapwood.state.contents import Contents, byte_view, to_torch_dtype
from sapwood.state.tensors import writable
from sapwood.tiers.digest import digest_of_row

__all__ = ["Arrival"]

_LOOK = 0.25


class Arrival:
    """The tensors of a state, filled message by message, in any order and on any thread."""

    def __init__(
        self,
        catalog: Catalog,
        contents: Contents,
        messages: Iterable[Message],
        *,
        algorithm: str,
        device: str,
    ) -> None:
        """``contents`` is the fresh run's; ``messages`` are all that will come, to ``device``."""
        self._algorithm = algorithm
        self._device = torch.device(device)
        self._targets: dict[Key, Tensor] = {}
        self.memory: dict[Key, Tensor] = {}
        for key, entry in catalog.by_key.items():
            there = contents.tensors.get(key) if key[0] == "model" else None
            view = None
            if there is not None:
                view = byte_view(there) if there.device == self._device else None
                if view is None:
                    self._targets[key] = there
            self.memory[key] = self.empty(entry.nbytes) if view is None else view
        self._catalog = catalog
        self._left: Counter[Key] = Counter()
        for message in messages:
            self._left.update({part.key: 1 for part in message.parts})
        self._events = {key: threading.Event() for key in catalog.by_key}
        for key, event in self._events.items():
            if not self._left[key]:
                event.set()  # it has no bytes
        self._lock = threading.Lock()
        self.digests: dict[int, str] = {}
        self.problem: Exception | None = None

    def place_for(self, message: Message, *, gathers: bool) -> list[Tensor]:
        """Where a message's bytes go: into tensors, or, if a link cannot do that, beside."""
        if len(message.parts) == 1 or gathers:
            return [self.memory[part.key][part.start : part.stop] for part in message.parts]
        return [self.empty(message.nbytes)]

    def empty(self, nbytes: int) -> Tensor:
        """Memory where messages can arrive."""
        if self._device.type == "cpu":
            return torch.from_numpy(fresh_memory(nbytes))
        return torch.empty(nbytes, dtype=torch.uint8, device=self._device)

    def arrived(self, message: Message, data: Sequence[Tensor]) -> None:
        """A message is there, in the memory it was given."""
        pieces = [one.cpu().numpy() for one in data]
        self.digests[message.tag] = digest_of_row(pieces, self._algorithm)
        if len(message.parts) > len(data):
            (packed,), at = data, 0
            for part in message.parts:
                self.memory[part.key][part.start : part.stop] = packed[at : at + part.nbytes]
                at += part.nbytes
        with self._lock:
            keys = {part.key for part in message.parts}
            for key in keys:
                self._left[key] -= 1
            done = [key for key in keys if not self._left[key]]
        for key in done:
            self._complete(key)

    def filled(self) -> None:
        """Everything is there at once."""
        for key in self.memory:
            self._complete(key)

    def of(self, file: str) -> dict[Key, npt.NDArray[np.uint8]]:
        """What came for the model, or for the optimizer, as bytes."""
        return {key: m.cpu().numpy() for key, m in self.memory.items() if key[0] == file}

    def fail(self, problem: Exception) -> None:
        """Nothing more will come; whoever waits is told."""
        self.problem = self.problem or problem
        for event in self._events.values():
            event.set()

    def wait(self, keys: Iterable[Key], timeout: float) -> None:
        """Wait until these tensors are complete.

        Raises:
            CloneError: they will not be.
        """
        for key in keys:
            if not self._events[key].wait(timeout):
                raise CloneError(f"{key[0]} {key[1]} has not arrived for {timeout:g} s")
        if self.problem is not None:
            raise CloneError(f"the state did not arrive: {self.problem}") from self.problem

    def wait_while(
        self, event: threading.Event, check: Callable[[], None], what: str, timeout: float
    ) -> None:
        """Wait for an event, as long as the state may still come and ``check`` raises nothing.

        Raises:
            CloneError: it will not come, or took longer than ``timeout`` seconds.
        """
        deadline = time.monotonic() + timeout
        while not event.wait(_LOOK):
            check()
            if self.problem is not None:
                raise CloneError(f"{what}: {self.problem}") from self.problem
            if time.monotonic() > deadline:
                raise CloneError(f"{what}: nothing for {timeout:g} s")

    def check(self, expected: Mapping[int, str], messages: Sequence[Message]) -> None:
        """Compare checksums with what the donors have sent.

        Raises:
            CloneError: some differ; which tensors.
        """
        bad = [m for m in messages if self.digests.get(m.tag) != expected.get(m.tag)]
        if bad:
            names = sorted({f"{p.key[0]} {p.key[1]}" for m in bad for p in m.parts})
            raise CloneError(
                f"{len(bad)} of {len(messages)} messages were changed on their way, of "
                f"{', '.join(names[:5])}{' and others' if len(names) > 5 else ''}"
            )

    def _complete(self, key: Key) -> None:
        target = self._targets.get(key)
        if target is not None:
            entry = self._catalog.by_key[key]
            value = self.memory[key].view(to_torch_dtype(entry.dtype)).view(entry.shape)
            with torch.no_grad():
                target, value = writable(target, value)
                target.copy_(value)
        self._events[key].set()
