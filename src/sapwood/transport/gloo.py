"""Messages through a gloo process group that exists for one transfer only.

Connections are made when the group is: with gloo's lazy ones the first ``send`` to a peer would
block its caller until that peer turns to us as well. gloo cannot abort a message, and a wait that
expires closes only its own pair, so ``close`` shuts the group's connections down. gloo may also
lose a message whose connection breaks while it is begun, and would never tell: control wires do.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

from torch import Tensor
from torch._C._distributed_c10d import ProcessGroupGloo

from sapwood.errors import ConfigError, TransportError
from sapwood.runtime.stores import PrefixStore, Store
from sapwood.transport import _sockets
from sapwood.transport._control import Control, meet
from sapwood.transport._meet import Deadline, late
from sapwood.transport.base import Ends

__all__ = ["GlooLink", "open_gloo"]

_MAKING = threading.Lock()
_WAKING = 1.0
_LOOK = 0.25


class GlooLink:
    """One end of a disposable gloo group."""

    name = "gloo"
    gathers = False

    def __init__(
        self, group: Any, control: Control, addresses: frozenset[_sockets.Address]
    ) -> None:
        """``addresses``: where each process of the group listens, which tells its connections."""
        self._group = group
        self._control = control
        self.gone: set[int] = set()
        control.on_gone = self.gone.add
        control.start()
        self._addresses = addresses
        self._lock = threading.Lock()
        self._under_way: set[_GlooTransfer] = set()
        self._broken: str | None = None

    def send(self, peer: int, tag: int, data: Tensor) -> _GlooTransfer:
        """Begin to send."""
        return self._begin("send", peer, tag, data)

    def recv(self, peer: int, tag: int, data: Tensor) -> _GlooTransfer:
        """Begin to receive."""
        return self._begin("recv", peer, tag, data)

    def close(self) -> None:
        """Cut the connections, which wakes whoever waits, and drop the group with its threads."""
        self.fail("the link is closed")
        with self._lock:
            group, self._group = self._group, None
            under_way, self._under_way = self._under_way, set()
        # A message still under way keeps the group's buffers and threads: let all of them go.
        for one in under_way:
            one.drop()
        self._control.close()
        del group

    def fail(self, why: str) -> None:
        """Remember why no message can succeed any more, and make those under way fail now."""
        with self._lock:
            if self._broken is not None:
                return
            self._broken = why
        _sockets.cut(self._addresses)

    def done(self, transfer: _GlooTransfer) -> None:
        """Forget a message that is over."""
        with self._lock:
            self._under_way.discard(transfer)

    def error(self, peer: int, tag: int, cause: object) -> TransportError:
        """Tell why a message failed: the first reason, which explains the later ones."""
        why = self._broken or str(cause)
        return TransportError(f"gloo: message {tag} with process {peer} failed: {why}")

    def _begin(self, act: str, peer: int, tag: int, data: Tensor) -> _GlooTransfer:
        with self._lock:
            group, broken = self._group, self._broken
        if group is None or broken is not None:
            raise self.error(peer, tag, "the link is closed")
        transfer = _GlooTransfer(self, peer, tag, data)
        if data.numel():
            try:
                transfer.work = getattr(group, act)([data], peer, tag)
            except RuntimeError as error:
                raise self.error(peer, tag, _first_line(error)) from error
            with self._lock:
                self._under_way.add(transfer)
        return transfer


class _GlooTransfer:
    """A message under way; an empty one is none."""

    def __init__(self, link: GlooLink, peer: int, tag: int, data: Tensor) -> None:
        self._link = link
        self._peer = peer
        self._tag = tag
        self._data: Tensor | None = data  # gloo does not keep the memory of a message alive
        self._waiting = threading.Lock()
        self.work: Any = None

    def wait(self, timeout: float) -> None:
        """Wait for the message; gloo tells nothing before."""
        with self._waiting:
            work = self.work
            if work is None:
                if self._data is None:
                    raise self._link.error(self._peer, self._tag, "the link is closed")
                return
            try:
                # A timeout of 0 is none to gloo.
                limit = timedelta(seconds=max(timeout, 0.001))
                self._wait_apart(work, limit)
            except RuntimeError as error:
                self._link.fail(_first_line(error))
                raise self._link.error(self._peer, self._tag, error) from error
            self.work = None
            self._link.done(self)

    def _wait_apart(self, work: Any, limit: timedelta) -> None:
        """Wait on a thread, so that a message gloo has lost is left when its peer is gone."""
        failed: list[str] = []  # an exception would keep the message, and so the group, alive
        over = threading.Event()

        def wait() -> None:
            try:
                work.wait(limit)
            except RuntimeError as error:
                failed.append(str(error))
            over.set()

        threading.Thread(target=wait, name="sapwood-gloo-wait", daemon=True).start()
        while not over.wait(_LOOK):
            if self._peer in self._link.gone and not over.wait(_LOOK):
                raise RuntimeError(f"process {self._peer} is gone")
        if failed:
            raise RuntimeError(failed[0])

    def drop(self) -> None:
        """Let go of a message that failed with its link."""
        # The connections are cut, so whoever waits is about to wake.
        held = self._waiting.acquire(timeout=_WAKING)
        self.work = self._data = None
        if held:
            self._waiting.release()


def open_gloo(store: Store, ends: Ends) -> GlooLink:
    """Meet the others in a gloo group of its own."""
    deadline = Deadline(ends.timeout)
    device, address = _device(ends)
    control = meet("gloo", store, ends, f"{address[0]} {address[1]}", deadline)
    listening = [one.split() for one in control.facts]
    known = frozenset((host, int(port)) for host, port in listening)
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = timedelta(seconds=max(deadline.left, 0.05))
    options._devices = [device]
    options._threads = 1
    try:
        group = ProcessGroupGloo(PrefixStore("gloo/group", store), ends.me, ends.size, options)
    except RuntimeError as error:
        _sockets.cut(known)
        control.close()
        if not deadline.left:
            raise late("gloo", "another process", ends.timeout) from error
        raise TransportError(f"gloo: the group cannot be made: {_first_line(error)}") from error
    return GlooLink(group, control, known)


def _device(ends: Ends) -> tuple[Any, _sockets.Address]:
    """A gloo device, which listens, and where."""
    failed = []
    with _MAKING:
        before = _sockets.listeners()
        for chosen in _candidates(ends):
            try:
                device = ProcessGroupGloo.create_device(**chosen)
            except RuntimeError as error:
                failed.append(f"{chosen}: {_first_line(error)}")
                continue
            new = sorted(set(_sockets.listeners()) - set(before))
            if new:
                return device, new[0]
            failed.append(f"{chosen}: it does not listen")
    raise ConfigError(
        f"gloo finds no network to use ({'; '.join(failed)}): set SAPWOOD_SOCKET_IFNAME or "
        "GLOO_SOCKET_IFNAME to an interface of `ip link` over which the processes reach each other"
    )


def _candidates(ends: Ends) -> Iterator[dict[str, str]]:
    name = os.environ.get("SAPWOOD_SOCKET_IFNAME") or os.environ.get("GLOO_SOCKET_IFNAME")
    if name:
        # gloo takes a list for several connections; one is enough here.
        yield {"interface": name.split(",")[0]}
    elif ends.one_machine:
        yield {"interface": "lo"}
    else:
        yield {"hostname": ends.hosts[ends.me]}


def _first_line(error: object) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else repr(error)
