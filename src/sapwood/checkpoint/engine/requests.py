"""What a rank may ask its engine for, one small function each."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import closing
from typing import TYPE_CHECKING, Any

import numpy as np

from sapwood.buffers import Arena
from sapwood.checkpoint.engine.messages import to_id, to_job, to_plan
from sapwood.checkpoint.engine.session import Session
from sapwood.checkpoint.engine.wire import Wire, WireError
from sapwood.errors import CheckpointError
from sapwood.tiers.base import Stored
from sapwood.tiers.memory import MemoryTier

if TYPE_CHECKING:
    from sapwood.checkpoint.engine.server import Server

__all__ = ["serve_request"]

Message = Mapping[str, Any]
_DRAIN = 0.25


def serve_request(
    server: Server, session: Session, wire: Wire, message: Message, fds: list[int]
) -> bool:
    """Do what a message asks for; True if it was a goodbye.

    Raises:
        WireError, KeyError, TypeError, ValueError, IndexError: it makes no sense.
    """
    op = message["op"]
    try:
        if op == "goodbye":
            return True
        if op == "lend":
            _lend(session, wire, message, fds)
        elif op in _ORDERS:
            with session.order_from(wire):
                _ORDERS[op](session, message)
            if op == "submit":
                server.retire_others(session.pipeline)
        elif op in _QUESTIONS:
            _QUESTIONS[op](server, wire, message)
        else:
            raise WireError(f"there is no request {op!r}")
    finally:
        for fd in fds:
            os.close(fd)
    return False


def _lend(session: Session, wire: Wire, message: Message, fds: list[int]) -> None:
    arena = Arena.attach(fds[0])
    fds.clear()  # it is the arena's now
    try:
        with session.order_from(wire):
            session.lend(int(message["arena"]), arena)
    except BaseException:
        arena.close()
        raise


# -- orders: nothing is answered; what becomes of a shard is reported as it happens --------------


def _plan(session: Session, message: Message) -> None:
    # A rank has one plan at a time; shards under way keep the one they came with.
    session.plans = {int(message["plan"]): to_plan(message)}


def _submit(session: Session, message: Message) -> None:
    session.submit(to_job(message, session.plans[int(message["plan"])]))


def _recall(session: Session, message: Message) -> None:
    session.recall(int(message["arena"]))


def _drop(session: Session, message: Message) -> None:
    session.pipeline.drop(to_id(message["id"]), [str(name) for name in message["tiers"]])


def _mend(session: Session, message: Message) -> None:
    session.pipeline.mend(to_id(message["id"]))


_ORDERS: dict[str, Callable[[Session, Message], None]] = {
    "plan": _plan,
    "submit": _submit,
    "recall": _recall,
    "drop": _drop,
    "mend": _mend,
}

# -- questions: answered under the number they came with -----------------------------------------


def _drained(server: Server, wire: Wire, message: Message) -> None:
    wire.send({"op": "answer", "ask": message["ask"], "done": server.drain(_DRAIN)})


def _list(server: Server, wire: Wire, message: Message) -> None:
    found = sorted({stored for tier in _memory(server) for stored in tier.shards()})
    rows = [[s.id.step, s.id.attempt, s.rank] for s in found]
    wire.send({"op": "answer", "ask": message["ask"], "shards": rows})


def _open(server: Server, wire: Wire, message: Message) -> None:
    stored = Stored(to_id(message["id"]), int(message["rank"]))
    for tier in _memory(server):
        try:
            shard = tier.open(stored)
        except CheckpointError:
            continue
        record = shard.record.encode().decode()
        answer = {"op": "answer", "ask": message["ask"], "record": record}
        arenas = (session.arena_of(stored) for session in list(server.sessions.values()))
        arena = next((found for found in arenas if found is not None), None)
        if arena is not None:
            wire.send(answer, [arena.fd])
            return
        # It came from a disk of this node: give it memory that can be handed over.
        with closing(Arena(len(shard.data), label="restore")) as copy:
            copy.bytes[:] = np.frombuffer(shard.data, np.uint8)
            wire.send(answer, [copy.fd])
        return
    why = f"shard {stored.rank} of {stored.id} is no longer in memory"
    wire.send({"op": "answer", "ask": message["ask"], "error": why})


def _memory(server: Server) -> list[MemoryTier]:
    """The memory tiers of all settings, newest first."""
    pipelines = reversed(list(server.pipelines.values()))
    return [t for p in pipelines for t in p.tiers.values() if isinstance(t, MemoryTier)]


_QUESTIONS: dict[str, Callable[[Server, Wire, Message], None]] = {
    "drain": _drained,
    "list": _list,
    "open": _open,
}
