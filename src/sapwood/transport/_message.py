"""A message that a thread of its link carries, and others wait for."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
from torch import Tensor

from sapwood.errors import ConfigError, TransportError

__all__ = ["Message"]


class Message:
    """One message of a link; done once, well or badly."""

    def __init__(self, link: str, peer: int, tag: int, data: Tensor) -> None:
        """``data`` stays alive as long as the message is under way."""
        if data.device.type != "cpu":
            raise ConfigError(
                f"transport {link!r} carries CPU memory only, but got a tensor on {data.device}; "
                "open the link with choose.open_link, which stages such tensors"
            )
        self.peer = peer
        self.tag = tag
        self.length = data.numel()
        self.moved = 0
        """Bytes copied so far, by the link's thread."""
        self.bytes: npt.NDArray[np.uint8] | None = data.detach().numpy()
        self.expired: Callable[[str], None] | None = None
        """What to call when somebody's patience ended: the link is of no use then."""
        self._link = link
        self._done = threading.Event()
        self._error: str | None = None
        if not self.length:
            self.finish()

    def wait(self, timeout: float) -> None:
        """Wait until it is done; raise why it failed."""
        if not self._done.wait(timeout):
            why = f"not done after {timeout:g} s: the other side is stopped, late or too slow"
            self.finish(why)
            if self.expired is not None:
                self.expired(f"message {self.tag} with process {self.peer} was {why}")
        if self._error is not None:
            raise TransportError(
                f"{self._link}: message {self.tag} with process {self.peer} failed: {self._error}"
            )

    @property
    def done(self) -> bool:
        """Whether it is over."""
        return self._done.is_set()

    def finish(self, error: str | None = None) -> None:
        """Say that it is over; only the first time counts."""
        if not self._done.is_set():
            self._error = error
            self._done.set()

    def release(self) -> None:
        """Let go of the memory; nobody touches it any more."""
        self.bytes = None
