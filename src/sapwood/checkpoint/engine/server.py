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
from functools import partial
from pathlib import Path
from typing import Any

from sapwood.checkpoint.engine.address import Address
from sapwood.checkpoint.engine.base import Progress
from sapwood.checkpoint.engine.messages import to_config
from sapwood.checkpoint.engine.pipeline import Pipeline
from sapwood.checkpoint.engine.requests import serve_request
from sapwood.checkpoint.engine.session import Session
from sapwood.checkpoint.engine.wire import Closed, Wire, WireError
from sapwood.errors import SapwoodError
from sapwood.runtime.heartbeat import silence
from sapwood.tiers.make import make_tiers, serve_peers

__all__ = ["Server"]

log = logging.getLogger(__name__)
_HELLO_TIMEOUT, _HELLO_BYTES = 10.0, 4 * 2**20
_SEND_TIMEOUT = 10.0
_FIRST_CONTACT = 30.0
_TICK = 0.5
_PAUSE = 0.05
_QUIET = 10.0
"""Seconds between two warnings of connections that were refused at once."""
_SILENCE = 600.0
"""Seconds one operation at a tier may take; after that the tier is taken to be gone."""
_TOKEN_TIMEOUT = 5.0


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
        self._yields = False
        self._places_gone = False
        self._silent_until = 0.0

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
        self._remove_token()
        self._listener.close()
        if self._places_gone:  # what is being written ends with the process, at once
            log.info("ended: the checkpoints were removed")
            return
        while not self._done(_TICK):
            pass  # others may have the name by now, but what is on its way is still carried on
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
        if self._yields:
            return True
        if self._ending.is_set():
            return self._done(_TICK, hurry=False)
        return not here and waited and self._done(0.0)

    def _done(self, timeout: float, *, hurry: bool = True) -> bool:
        """Whether nothing is on its way, or nothing that moves.

        ``hurry``: nobody is left to wait for a tier that fails, so that it is not tried again.
        """
        if hurry:
            for pipeline in list(self.pipelines.values()):
                pipeline.hurry()
        if self.drain(timeout):
            return True
        if silence() < _SILENCE:
            return False
        log.error("a tier has not moved for %g s; what was on its way there is lost", silence())
        return True

    def _remove_token(self) -> None:
        """Take the token away while the name is still ours: a later engine leaves its own.

        On a thread, because a file system that is gone may never answer.
        """
        remover = threading.Thread(target=self._address.remove_token, daemon=True)
        remover.start()
        remover.join(_TOKEN_TIMEOUT)

    # -- one thread per rank -----------------------------------------------------------------

    def _accept(self) -> None:
        wire: Wire | None = None
        try:
            sock, _ = self._listener.accept()
            wire = Wire(sock, send_timeout=_SEND_TIMEOUT)
            self._check_user(wire)  # before it costs a thread
            threading.Thread(target=self._attend, args=(wire,), daemon=True).start()
        except (OSError, RuntimeError, WireError) as error:
            if wire is not None:
                wire.close()
            self._warn(f"a connection is refused: {error}")
            if not isinstance(error, WireError):
                time.sleep(_PAUSE)  # out of descriptors or threads, which passes

    def _check_user(self, wire: Wire) -> None:
        pid, uid = wire.peer
        if uid != os.getuid():
            raise WireError(f"process {pid} is of user {uid}, this engine of {os.getuid()}")

    def _warn(self, what: str) -> None:
        """Say it, but let nobody fill the log."""
        if time.monotonic() >= self._silent_until:
            self._silent_until = time.monotonic() + _QUIET
            log.warning("%s", what)

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
        self._check_user(wire)
        pid, _ = wire.peer
        wire.patience(_HELLO_TIMEOUT)
        hello, fds = wire.receive(_HELLO_BYTES)
        for fd in fds:
            os.close(fd)
        if hello["op"] != "hello" or not self._knows(hello.get("tokens")):
            raise WireError(f"the token is wrong: {self._stand_aside()}")
        wire.patience(None)
        name, group = str(hello["session"]), str(hello["group"])
        pipeline = self._pipeline(hello["config"])
        pipeline.hurry(hurried=False)
        with self._lock:
            session = self.sessions.setdefault(name, Session(name, group, pipeline))
            if not session.attach(wire, int(hello["attempt"])):
                raise WireError("a later connection of this rank is there already")
            session.pipeline = pipeline
            self._dead.pop(name, None)
            self._linger, self._group = float(hello["linger"]), group
        log.info("process %d is here as session %s", pid, name)
        return session

    def _knows(self, shown: object) -> bool:
        """Whether the token is among those a rank shows: its own, and what it found here."""
        tokens = [str(token).encode() for token in shown] if isinstance(shown, list) else []
        return any(hmac.compare_digest(token, self._token.encode()) for token in tokens)

    def _stand_aside(self) -> str:
        """Somebody wants the name who does not know the token: leave it, unless a rank is here.

        It is the same user, as the kernel says, who saves to the same places, and the file with the
        token is out of reach: whoever wrote it is not coming back. What to tell them.
        """
        with self._lock:
            here = [s for s in self.sessions.values() if s.alive]
        if here:
            return (
                f"this engine serves another training that saves here, process {here[0].pid}; use "
                "another place, or end that one first"
            )
        log.info("another training wants to save here: this engine, which nobody uses, ends")
        # Checkpoints whose folder was removed are not to come back.
        self._places_gone = not self._address.token_there and self._emptied()
        self._yields = True
        os.eventfd_write(self._wake, 1)
        return "this engine belongs to a training that is gone, and ends now; try again"

    def _emptied(self) -> bool:
        """Whether checkpoints go to folders, and none of those has anything in it."""
        configs = [to_config(json.loads(key)) for key in list(self.pipelines)]
        specs = [spec for found, _ in configs for spec in found if spec.kind != "memory"]
        return bool(specs) and not any(not s.folder or _any_in(Path(s.folder)) for s in specs)

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
                tell = partial(self._tell_all, key)
                self.pipelines[key] = Pipeline(pairs, tell, on_close=peers.close)
            return self.pipelines[key]

    def _tell_all(self, key: str, progress: Progress) -> None:
        """Tell every rank with these settings: which of them may remove checkpoints, they know."""
        with self._lock:
            pipeline = self.pipelines.get(key)
            found = [s for s in self.sessions.values() if s.pipeline is pipeline and s.attached]
        for session in found:
            session.tell(progress)

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


def _any_in(folder: Path) -> bool:
    """Whether a folder holds anything a user sees."""
    try:
        return any(not entry.name.startswith(".") for entry in folder.iterdir())
    except FileNotFoundError:
        return False
    except OSError:  # it cannot be looked at; then nobody knows that it is empty
        return True
