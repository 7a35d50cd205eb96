"""Messages between GPUs, by an NCCL group that exists for one transfer only.

NCCL knows no tags: what is sent first is received first. So a receiver says what it waits for, the
sender says what it sends next, and both sides post in that order.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from sapwood.errors import ConfigError, TransportError
from sapwood.runtime.stores import PrefixStore, Store
from sapwood.transport._control import Control, Packet, meet
from sapwood.transport._meet import Deadline
from sapwood.transport.base import Ends

__all__ = ["OrderedLink", "open_nccl"]

_WANT, _GO = 1, 2
_Key = tuple[int, int]


class OrderedLink:
    """A link on a process group that matches messages by their order."""

    gathers = False

    def __init__(self, name: str, group: Any, control: Control, abort: Callable[[], None]) -> None:
        """``abort`` ends what the group has under way."""
        self.name = name
        self._group = group
        self._control = control
        self._abort = abort
        self._lock = threading.Lock()
        self._sends: dict[_Key, _Ordered] = {}
        self._receives: dict[_Key, _Ordered] = {}
        self._wanted: set[_Key] = set()
        self._gone: dict[int, str] = {}
        self._broken: str | None = None
        control.on_packet, control.on_gone = self._on_packet, self._on_gone
        control.start()

    def send(self, peer: int, tag: int, data: Tensor) -> _Ordered:
        """Begin to send, once the receiver waits for it."""
        transfer = _Ordered(self, peer, tag, data)
        with self._lock:
            self._check(peer)
            self._sends[peer, tag] = transfer
            if (peer, tag) in self._wanted:
                self._go(peer, tag)
        return transfer

    def recv(self, peer: int, tag: int, data: Tensor) -> _Ordered:
        """Begin to receive, once the sender says that it is next."""
        transfer = _Ordered(self, peer, tag, data)
        with self._lock:
            self._check(peer)
            self._receives[peer, tag] = transfer
        self._control.tell(peer, (_WANT, tag, 0, 0))
        return transfer

    def close(self) -> None:
        """End the group at once."""
        self.fail("the link is closed")
        self._control.close()
        self._group = None

    def fail(self, why: str) -> None:
        """Fail everything under way and to come."""
        with self._lock:
            if self._broken is not None:
                return
            self._broken = why
            self._drop([*self._sends.values(), *self._receives.values()], why)
        self._abort()

    def _check(self, peer: int) -> None:
        why = self._broken or self._gone.get(peer)
        if why is not None:
            raise TransportError(f"{self.name}: {why}; open another link")

    def _go(self, peer: int, tag: int) -> None:
        """Send next, on both sides; in one piece, so that the order is the same there."""
        self._wanted.discard((peer, tag))
        self._control.tell(peer, (_GO, tag, 0, 0))
        self._sends.pop((peer, tag)).post(self._group.send)

    def _on_packet(self, peer: int, packet: Packet) -> None:
        kind, tag = packet[:2]
        with self._lock:
            if self._broken is not None:
                return
            if kind == _GO and (peer, tag) in self._receives:
                self._receives.pop((peer, tag)).post(self._group.recv)
            elif kind == _WANT:
                self._wanted.add((peer, tag))
                if (peer, tag) in self._sends:
                    self._go(peer, tag)

    def _on_gone(self, peer: int) -> None:
        why = f"process {peer} is gone"
        with self._lock:
            self._gone[peer] = why
            both = [*self._sends.items(), *self._receives.items()]
            self._drop([one for (number, _), one in both if number == peer], why)

    def _drop(self, transfers: list[_Ordered], why: str) -> None:
        for one in transfers:
            one.refuse(why)


class _Ordered:
    """A message that is posted when its turn comes."""

    def __init__(self, link: OrderedLink, peer: int, tag: int, data: Tensor) -> None:
        self._link, self._peer, self._tag = link, peer, tag
        self._data = data
        self._posted = threading.Event()
        self._work: Any = None
        self._error: str | None = None

    def post(self, act: Callable[..., Any]) -> None:
        """Hand it to the group; the group's tag is not used."""
        try:
            self._work = act([self._data], self._peer, 0) if self._data.numel() else None
        except RuntimeError as error:
            self._error = str(error)
        self._posted.set()

    def refuse(self, why: str) -> None:
        """Say that its turn will not come."""
        self._error = why
        self._posted.set()

    def wait(self, timeout: float) -> None:
        """Wait for its turn, and for the group to be done with it."""
        deadline = Deadline(timeout)
        if not self._posted.wait(timeout):
            self._error = f"its turn did not come within {timeout:g} s"
            self._link.fail(self._error)
        if self._error is None and self._work is not None:
            try:
                self._work.wait(timedelta(seconds=max(deadline.left, 0.001)))
                self._work = None
            except RuntimeError as error:
                self._error = str(error)
                self._link.fail(self._error)
        if self._error is not None:
            raise TransportError(
                f"{self._link.name}: message {self._tag} with process {self._peer} failed: "
                f"{self._error}"
            )


def open_nccl(store: Store, ends: Ends) -> OrderedLink:
    """Meet the others in an NCCL group of its own, on this process's current GPU."""
    if not (torch.cuda.is_available() and torch.distributed.is_nccl_available()):
        raise ConfigError("transport 'nccl' needs CUDA and a torch that was built with NCCL")
    from torch.distributed import ProcessGroupNCCL

    control = meet("nccl", store, ends, "", Deadline(ends.timeout))
    options = ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=ends.timeout)
    try:
        group = ProcessGroupNCCL(PrefixStore("nccl/group", store), ends.me, ends.size, options)
    except RuntimeError as error:
        control.close()
        raise TransportError(f"nccl: the group cannot be made: {error}") from error
    return OrderedLink("nccl", group, control, group.abort)
