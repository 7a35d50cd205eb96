"""Blobs on their way to another node, and bytes on their way back."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Protocol

from sapwood.channel.connection import BLOCK_BYTES, Connection
from sapwood.errors import CheckpointError, SapwoodError, TierError
from sapwood.runtime.heartbeat import beat
from sapwood.tiers.room import NoRoomError

__all__ = ["Download", "Upload", "answer"]

_KINDS: dict[str, type[SapwoodError]] = {
    "CheckpointError": CheckpointError,
    "NoRoomError": NoRoomError,
}


class Owner(Protocol):
    """Whose connections these are."""

    def errors(self) -> AbstractContextManager[None]:
        """Say whose they are in what goes wrong inside."""
        ...

    def give_back(self, connection: Connection) -> None:
        """A connection is idle and in order."""
        ...

    def discard(self, connection: Connection) -> None:
        """A connection's exchange did not end."""
        ...


class Upload:
    """A blob on its way to another node. Fulfils ``Sink``."""

    def __init__(self, owner: Owner, connection: Connection, nbytes: int) -> None:
        """Made by ``Peer``."""
        self._owner = owner
        self._left = nbytes
        self._connection: Connection | None = connection

    def write(self, data: Any) -> None:
        """Send the next bytes."""
        assert self._connection is not None
        memory = memoryview(data).cast("B")
        self._left -= len(memory)
        with self._owner.errors():
            for start in range(0, len(memory), BLOCK_BYTES):
                self._connection.send_bytes(memory[start : start + BLOCK_BYTES])
                beat()

    def seal(self, record: bytes) -> None:
        """Send the record."""
        assert self._connection is not None
        assert self._left == 0, f"{self._left} bytes of the blob were not given"
        with self._owner.errors():
            self._connection.send({"record": len(record)})
            self._connection.send_bytes(record)

    def wait(self) -> None:
        """Wait for the node to say that it is durable there."""
        assert self._connection is not None
        with self._owner.errors():
            answer(self._connection)
        self._owner.give_back(self._connection)
        self._connection = None

    def close(self) -> None:
        """End the connection, if the blob is not there yet: the node then forgets it."""
        if self._connection is not None:
            self._owner.discard(self._connection)
            self._connection = None


class Download:
    """Bytes that were asked for. Fulfils ``Pending``."""

    def __init__(self, owner: Owner, connection: Connection) -> None:
        """Made by ``Peer``."""
        self._owner = owner
        self._connection: Connection | None = connection

    def into(self, out: Any) -> None:
        """Receive them."""
        connection, self._connection = self._connection, None
        assert connection is not None
        try:
            with self._owner.errors():
                _expect(answer(connection), memoryview(out).nbytes)
                connection.receive_into(out)
        except CheckpointError:
            self._owner.give_back(connection)
            raise
        except BaseException:
            self._owner.discard(connection)
            raise
        self._owner.give_back(connection)

    def close(self) -> None:
        """End the connection, if its answer was not taken."""
        if self._connection is not None:
            self._owner.discard(self._connection)
            self._connection = None


def answer(connection: Connection) -> dict[str, Any]:
    """The next answer.

    Raises:
        CheckpointError: what was asked for is not there.
        TierError: it could not be done.
    """
    found = connection.receive()
    if "error" not in found:
        return found
    kind = _KINDS.get(str(found.get("kind")), TierError)
    raise kind(str(found["error"]))


def _expect(answer: dict[str, Any], nbytes: int) -> None:
    if answer.get("nbytes") != nbytes:
        raise TierError(f"it announced {answer.get('nbytes')!r} bytes, expected {nbytes}")
