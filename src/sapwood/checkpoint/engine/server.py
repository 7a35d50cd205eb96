"""The engine of a node: takes shards from ranks, and outlives them until the shards are safe."""

from __future__ import annotations

import hmac
import json
import logging
import os
import select
import socket
import threading
import time
from contextlib import suppress
from typing import Any

from sapwood.checkpoint.engine.address import Address
from sapwood.checkpoint.engine.messages import to_config
from sapwood.checkpoint.engine.pipeline import Pipeline
from sapwood.checkpoint.engine.requests import serve_request
from sapwood.checkpoint.engine.session import Session
from sapwood.checkpoint.engine.wire import Closed, Wire, WireError
from sapwood.errors import SapwoodError
from sapwood.tiers.make import make_tiers, serve_peers

__all__ = ["Server"]

log = logging.getLogger(__name__)
_HELLO_TIMEOUT, _HELLO_BYTES = 10.0, 4 * 2**20
_SEND_TIMEOUT = 10.0
_FIRST_CONTACT = 30.0
_TICK = 0.5


class Server:
    """Accepts ranks until none is left and nothing is on its way."""

    def __init__(
        self, listener: socket.socket, address: Address, token: str, linger: float
    ) -> None:
        """``linger``: seconds to wait for ranks that come back after all of them died."""
        self.sessions: dict[str, Session] = {}
        self.pipelines: dict[str, Pipeline] = {}
        self._listener = listener
        self._address = address
        self._token = token
        self._linger = linger
        self._lock = threading.Lock()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._group = ""
        self._dead: dict[str, str] = {}  # the groups of sessions that broke off
        self._alone_since = time.monotonic()
        self._grace = max(linger, _FIRST_CONTACT)
        self._ending = threading.Event()

    def serve(self) -> None:
        """Run until there is nothing more to do."""
        poll = select.poll()
        poll.register(self._listener, select.POLLIN)
        poll.register(self._wake, select.POLLIN)
        while not self._over():
            for fd, _ in poll.poll(_TICK * 1000):
                if fd == self._wake:
                    os.eventfd_read(self._wake)
                else:
                    self._accept()
        # While the name is still ours: a later engine leaves a token of its own.
        self._address.remove_token()
        self._listener.close()
        for pipeline in list(self.pipelines.values()):
            pipeline.close(_SEND_TIMEOUT)
        log.info("ended")

    def end(self, *_: object) -> None:
        """Finish what is on its way and end, whoever is still connected (a signal handler)."""
        self._ending.set()

    def drain(self, timeout: float) -> bool:
        """Wait until nothing is on its way; False if that took too long."""
        deadline = time.monotonic() + timeout
        found = list(self.pipelines.values())
        return all(p.drain(max(0.0, deadline - time.monotonic())) for p in found)

    def _over(self) -> bool:
        with self._lock:
            self.sessions = {n: s for n, s in self.sessions.items() if s.attached or not s.idle}
            here = any(s.attached for s in self.sessions.values())
            waited = time.monotonic() - self._alone_since > self._grace
        if self._ending.is_set():
            return self.drain(_TICK)
        return not here and waited and self.drain(0.0)

    # -- one thread per rank -----------------------------------------------------------------

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError as error:
            log.warning("a rank could not connect: %s", error)
            return
        wire = Wire(sock, send_timeout=_SEND_TIMEOUT)
        threading.Thread(target=self._attend, args=(wire,), daemon=True).start()

    def _attend(self, wire: Wire) -> None:
        session: Session | None = None
        clean = False
        try:
            session = self._admit(wire)
            busy, under_way = session.state()
            wire.send({"op": "welcome", "busy": busy, "open": under_way})
            while not clean:
                clean = serve_request(self, session, wire, *wire.receive())
        except Closed:
            pass
        except (SapwoodError, KeyError, TypeError, ValueError, IndexError) as error:
            self._refuse(wire, f"{type(error).__name__}: {error}")
        except Exception as error:
            log.exception("unforeseen, while serving a rank")
            self._refuse(wire, f"the engine failed: {type(error).__name__}: {error}")
        finally:
            if session is not None:
                ends = self._left(session, wire, clean=clean)
                if clean:
                    with suppress(WireError):
                        wire.send({"op": "farewell", "ends": ends})
            wire.close()

    def _refuse(self, wire: Wire, why: str) -> None:
        log.warning("a connection is refused: %s", why)
        try:
            wire.send({"op": "refused", "why": why})
        except WireError:
            return

    def _admit(self, wire: Wire) -> Session:
        """The session of whoever says hello, if it may."""
        pid, uid = wire.peer
        if uid != os.getuid():
            raise WireError(f"process {pid} is of user {uid}, this engine of {os.getuid()}")
        wire.patience(_HELLO_TIMEOUT)
        hello, fds = wire.receive(_HELLO_BYTES)
        for fd in fds:
            os.close(fd)
        shown = str(hello.get("token", "")).encode()
        if hello["op"] != "hello" or not hmac.compare_digest(shown, self._token.encode()):
            raise WireError("the token is wrong: this engine belongs to another group")
        wire.patience(None)
        name, group = str(hello["session"]), str(hello["group"])
        pipeline = self._pipeline(hello["config"])
        with self._lock:
            session = self.sessions.setdefault(name, Session(name, group, pipeline))
            if not session.attach(wire, int(hello["attempt"])):
                raise WireError("a later connection of this rank is there already")
            session.pipeline = pipeline
            self._dead.pop(name, None)
            self._linger, self._group = float(hello["linger"]), group
        log.info("process %d is here as session %s", pid, name)
        return session

    def _left(self, session: Session, wire: Wire, *, clean: bool) -> bool:
        """A rank has left; whether the engine ends now."""
        with self._lock:
            if session.detach(wire):
                if not clean:
                    self._dead[session.name] = session.group
                # Every rank of the newest group said goodbye: end at once. Some died: it may be
                # started again.
                self._grace = self._linger if self._group in self._dead.values() else 0.0
                self._alone_since = time.monotonic()
            alone = not any(s.attached for s in self.sessions.values())
        log.info("session %s %s", session.name, "said goodbye" if clean else "is gone")
        os.eventfd_write(self._wake, 1)
        return alone and not self._grace

    # -- tiers -------------------------------------------------------------------------------

    def _pipeline(self, config: Any) -> Pipeline:
        """The pipeline of these settings; a training that comes back may have others."""
        key = json.dumps(config, sort_keys=True)
        with self._lock:
            if key not in self.pipelines:
                specs, nodes = to_config(config)
                peers = serve_peers(specs, nodes)
                try:
                    tiers = make_tiers(specs, nodes)
                except BaseException:
                    peers.close()
                    raise
                pairs = list(zip(specs, tiers, strict=True))
                self.pipelines[key] = Pipeline(pairs, _unheard, on_close=peers.close)
            return self.pipelines[key]

    def retire_others(self, pipeline: Pipeline) -> None:
        """Close pipelines of settings nobody has any more; what their memory holds goes with them.

        Only when a newer one is in use: until then a rank may want to restore from that memory.
        """
        with self._lock:
            used = {id(s.pipeline) for s in self.sessions.values() if s.attached}
            old = {
                key: p
                for key, p in self.pipelines.items()
                if p is not pipeline and id(p) not in used and p.drain(0.0)
            }
            for key in old:
                del self.pipelines[key]
        for one in old.values():
            one.close(_SEND_TIMEOUT)


def _unheard(progress: object) -> None:
    log.debug("nobody hears of %s", progress)
