"""A message that a thread of its link carries, and others wait for."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import numpy.typing as npt
from torch import Tensor

from sapwood.errors import ConfigError, TransportError, UsageError

__all__ = ["MOST_PIECES", "Message"]

MOST_PIECES = 1024


class Message:
    """One message of a link; done once, well or badly."""

    def __init__(self, link: str, peer: int, tag: int, data: Tensor | Sequence[Tensor]) -> None:
        """``data`` stays alive as long as the message is under way; several are one in a row."""
        tensors = [data] if isinstance(data, Tensor) else list(data)
        for tensor in tensors:
            if tensor.device.type != "cpu":
                raise ConfigError(
                    f"transport {link!r} carries CPU memory only, but got a tensor on "
                    f"{tensor.device}; choose.open_link makes links that stage such tensors"
                )
        self.peer = peer
        self.tag = tag
        if len(tensors) > MOST_PIECES:
            raise UsageError(f"a message has {len(tensors)} pieces, expected {MOST_PIECES} at most")
        self.pieces: list[npt.NDArray[np.uint8]] = [one.detach().numpy() for one in tensors]
        self.length = sum(len(piece) for piece in self.pieces)
        self.moved = 0
        """Bytes copied so far, by the link's thread."""
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

    @property
    def bytes(self) -> npt.NDArray[np.uint8] | None:
        """The memory of a message that is in one piece; None when it was let go of."""
        return self.pieces[0] if self.pieces else None

    def parts(self, start: int, length: int) -> Iterator[npt.NDArray[np.uint8]]:
        """Some bytes of it, piece by piece."""
        for piece in self.pieces:
            if length > 0 and start < len(piece):
                part = piece[start : start + length]
                length -= len(part)
                yield part
            start = max(start - len(piece), 0)

    def release(self) -> None:
        """Let go of the memory; nobody touches it any more."""
        self.pieces = []
