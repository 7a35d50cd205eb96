"""A rank's connection to its node's engine, and how it comes about."""

from __future__ import annotations

import os
import queue
import select
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import count
from typing import Any

from sapwood.checkpoint.engine.address import Address
from sapwood.checkpoint.engine.wire import Closed, Late, Wire, WireError
from sapwood.errors import CheckpointError

__all__ = ["Link", "Refused", "connect"]

SEND_TIMEOUT = 10.0
"""Seconds the engine may leave a message unread: only one that is stopped reads nothing."""
HELLO_TIMEOUT = 10.0

Answer = tuple[Mapping[str, Any], list[int]]


class Refused(CheckpointError):
    """An engine is there, but does not want this rank."""


class Link:
    """A connection an engine has accepted; a thread of it reads."""

    def __init__(self, wire: Wire, welcome: Mapping[str, Any]) -> None:
        """``welcome`` is the engine's answer to the hello."""
        self.wire = wire
        self.welcome = welcome
        self.pid, _ = wire.peer
        self.plan: object = None
        """The plan the engine was sent last, under ``plan_number``."""
        self.plan_number = 0
        self._process = _open_process(self.pid)
        self._numbers = count()
        self._waiting: dict[int, queue.SimpleQueue[Answer | None]] = {}
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._over = False
        self.finished = threading.Event()
        """Set when the conversation has ended."""

    def start(
        self, heard: Callable[[Mapping[str, Any]], None], lost: Callable[[Link, str], None]
    ) -> None:
        """Begin to read: ``heard`` is called for each message, ``lost`` once, at the end."""
        self._thread = threading.Thread(
            target=self._read, args=(heard, lost), name="sapwood-engine-link", daemon=True
        )
        self._thread.start()

    def ask(self, op: str, timeout: float, **facts: Any) -> Answer:
        """Ask the engine something and wait for the answer; its descriptors are the caller's.

        Raises:
            WireError: there is no answer.
        """
        number = next(self._numbers)
        answer: queue.SimpleQueue[Answer | None] = queue.SimpleQueue()
        with self._lock:
            if self._over:
                raise WireError("the engine is gone")
            self._waiting[number] = answer
        try:
            self.wire.send({"op": op, "ask": number, **facts})
            found = answer.get(timeout=timeout)
        except queue.Empty:
            raise Late(f"engine {self.pid} has not answered for {timeout:g} s") from None
        finally:
            with self._lock:
                self._waiting.pop(number, None)
        if found is None:
            raise WireError("the engine is gone")
        return found

    def dead(self, timeout: float = 0.0) -> bool:
        """Whether the engine's process has ended; waits for it up to ``timeout`` seconds."""
        if self._process < 0:
            return True
        poll = select.poll()
        poll.register(self._process, select.POLLIN)
        return bool(poll.poll(timeout * 1000))

    def close(self) -> None:
        """End the conversation and the thread."""
        self.wire.shut()
        if self._thread is None:  # which would do it
            self.wire.close()
        elif self._thread is not threading.current_thread():
            self._thread.join(5.0)

    def release(self) -> None:
        """Forget the engine's process; ``dead`` is of no use after that."""
        if self._process >= 0:
            os.close(self._process)
            self._process = -1

    def _read(
        self, heard: Callable[[Mapping[str, Any]], None], lost: Callable[[Link, str], None]
    ) -> None:
        reason = "it ended"
        try:
            while True:
                self._deliver(heard, *self.wire.receive())
        except Closed:
            pass
        except WireError as error:
            reason = str(error)
        finally:
            with self._lock:
                self._over = True
                for waiting in self._waiting.values():
                    waiting.put(None)
            self.wire.close()
            self.finished.set()
            lost(self, reason)

    def _deliver(
        self, heard: Callable[[Mapping[str, Any]], None], message: dict[str, Any], fds: list[int]
    ) -> None:
        if message["op"] == "refused":
            raise WireError(f"it refused: {message.get('why')}")
        if message["op"] == "answer":
            with self._lock:
                waiting = self._waiting.get(message.get("ask", -1))
            if waiting is not None:
                waiting.put((message, fds))
                return
        for fd in fds:  # nobody waits for them any more
            os.close(fd)
        heard(message)


def connect(address: Address, tokens: Sequence[str], hello: Mapping[str, Any]) -> Link | None:
    """Connect to the engine at an address, if there is one.

    All tokens are shown at once: an engine that knew none of them would leave its name to us.

    Raises:
        Refused: it is another user's, or knows none of the tokens.
        WireError: it does not answer.
    """
    sock = _dial(address)
    if sock is None:
        return None
    wire = Wire(sock, send_timeout=SEND_TIMEOUT)
    try:
        return Link(wire, _shake_hands(wire, {**hello, "op": "hello", "tokens": list(tokens)}))
    except Closed:  # it was about to end
        wire.close()
        return None
    except BaseException:
        wire.close()
        raise


def _dial(address: Address) -> socket.socket | None:
    sock = socket.socket(socket.AF_UNIX)
    sock.settimeout(HELLO_TIMEOUT)
    try:
        sock.connect(address.socket)
        return sock
    except ConnectionRefusedError:
        sock.close()
        return None
    except OSError as error:
        sock.close()
        raise Late(f"the engine at {address.name} takes no more connections") from error


def _shake_hands(wire: Wire, hello: Mapping[str, Any]) -> dict[str, Any]:
    pid, uid = wire.peer
    if uid != os.getuid():
        raise Refused(
            f"process {pid} of user {uid} has taken the name of this user's checkpoint engine"
        )
    if not pid:
        raise Refused("the checkpoint engine is out of sight, in another pid namespace")
    wire.patience(HELLO_TIMEOUT)
    try:
        wire.send(hello)
        answer, fds = wire.receive()
    except Late as error:
        raise Late(
            f"the checkpoint engine of this node, process {pid}, does not answer: it is stopped or "
            "stuck; let it go on (kill -CONT) or end it"
        ) from error
    for fd in fds:
        os.close(fd)
    if answer["op"] != "welcome":
        raise Refused(f"checkpoint engine {pid} refused this rank: {answer.get('why')}")
    wire.patience(None)
    return answer


def _open_process(pid: int) -> int:
    with suppress(OSError):
        return os.pidfd_open(pid)
    return -1
