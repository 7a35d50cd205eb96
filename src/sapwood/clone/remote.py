"""The board of a fork, as everybody but rank 0 of the donors sees it; and its server's side."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from sapwood.channel.connection import ChannelError, Connection
from sapwood.channel.dial import dial_tcp
from sapwood.channel.pool import Pool
from sapwood.clone.board import Board

__all__ = ["BoardAccess", "RemoteBoard", "answer_board"]

VALUE_LIMIT = 256 * 2**20
"""Bytes of one value; the manifest of a model with a million tensors has about as many."""
MESSAGE_LIMIT = 2**20


class BoardAccess(Protocol):
    """A board, here or elsewhere. Every call raises ``OSError`` if it is gone."""

    def set(self, key: str, value: bytes) -> None:
        """Write."""
        ...

    def get(self, key: str, timeout: float | None = None) -> bytes | None:
        """Read what is there, or None; ``timeout``: seconds for the answer, if not the usual."""
        ...

    def add(self, key: str, amount: int) -> int:
        """Add to a number, which is 0 at first; the sum."""
        ...

    def compare_set(self, key: str, expected: bytes, value: bytes) -> bytes:
        """Write if ``expected`` is there (empty: nothing); what then is there."""
        ...

    def delete(self, key: str) -> bool:
        """Forget; whether it was there."""
        ...

    def wait_any(self, keys: list[str], seconds: float, at_least: int | None = None) -> str | None:
        """The first of ``keys`` that is written, None after ``seconds``."""
        ...

    def close(self) -> None:
        """End it: whoever waits is woken."""
        ...


class RemoteBoard:
    """The board that rank 0 of the donors keeps; ``timeout``: seconds it may take to answer."""

    def __init__(self, host: str, port: int, token: str, *, timeout: float) -> None:
        """Nothing is connected yet."""
        self.timeout = timeout
        self._pool = Pool(
            lambda within: dial_tcp(host, port, token, timeout=timeout, within=within)
        )

    def set(self, key: str, value: bytes) -> None:
        """Write."""
        self._ask({"op": "set", "key": key, "nbytes": len(value)}, value)

    def get(self, key: str, timeout: float | None = None) -> bytes | None:
        """Read what is there, or None; ``timeout``: seconds for all of it, if not the usual."""
        answer, value = self._ask({"op": "get", "key": key}, timeout=timeout)
        return value if answer["found"] else None

    def add(self, key: str, amount: int) -> int:
        """Add to a number, which is 0 at first; the sum."""
        answer, _ = self._ask({"op": "add", "key": key, "amount": amount})
        return int(answer["sum"])

    def compare_set(self, key: str, expected: bytes, value: bytes) -> bytes:
        """Write if ``expected`` is there (empty: nothing); what then is there."""
        split, nbytes = len(expected), len(expected) + len(value)
        request = {"op": "compare_set", "key": key, "split": split, "nbytes": nbytes}
        return self._ask(request, expected + value)[1]

    def delete(self, key: str) -> bool:
        """Forget; whether it was there."""
        return bool(self._ask({"op": "delete", "key": key})[0]["found"])

    def wait_any(self, keys: list[str], seconds: float, at_least: int | None = None) -> str | None:
        """The first of ``keys`` that is written, None after ``seconds``."""
        request = {"op": "wait", "keys": keys, "seconds": seconds, "at_least": at_least}
        found = self._ask(request, wait=seconds)[0]["key"]
        return None if found is None else str(found)

    def ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Ask the fork listener for something that is not the board's."""
        return self._ask(request)[0]

    def close(self) -> None:
        """End the connections: whoever waits is woken."""
        self._pool.close()

    def _ask(
        self,
        request: Mapping[str, Any],
        data: bytes = b"",
        *,
        wait: float = 0.0,
        timeout: float | None = None,
    ) -> tuple[dict[str, Any], bytes]:
        end = time.monotonic() + (math.inf if timeout is None else timeout)
        with (
            self._pool.connection(timeout=timeout) as connection,
            connection.within(end - time.monotonic()),
        ):
            connection.send(request)
            connection.send_bytes(data)
            answer = connection.receive(limit=MESSAGE_LIMIT, timeout=wait + self.timeout)
            if "error" in answer:
                raise ChannelError(str(answer["error"]))
            return answer, _receive_value(connection, answer)


def answer_board(board: Board, connection: Connection, request: Mapping[str, Any]) -> bool:
    """Answer a request that is the board's; False if it is not."""
    act = _OPERATIONS.get(str(request.get("op")))
    if act is None:
        return False
    value = _receive_value(connection, request)
    answer, data = act(board, request, value)
    connection.send({**answer, "nbytes": len(data)})
    connection.send_bytes(data)
    return True


def _receive_value(connection: Connection, message: Mapping[str, Any]) -> bytes:
    nbytes = message.get("nbytes", 0)
    if not isinstance(nbytes, int) or not 0 <= nbytes <= VALUE_LIMIT:
        raise ChannelError(f"a value of {nbytes!r} bytes was announced, at most {VALUE_LIMIT}")
    value = bytearray(nbytes)
    connection.receive_into(value)
    return bytes(value)


_Answer = tuple[dict[str, Any], bytes]


def _set(board: Board, request: Mapping[str, Any], value: bytes) -> _Answer:
    board.set(str(request["key"]), value)
    return {}, b""


def _get(board: Board, request: Mapping[str, Any], _: bytes) -> _Answer:
    value = board.get(str(request["key"]))
    return {"found": value is not None}, value or b""


def _add(board: Board, request: Mapping[str, Any], _: bytes) -> _Answer:
    return {"sum": board.add(str(request["key"]), int(request["amount"]))}, b""


def _compare_set(board: Board, request: Mapping[str, Any], value: bytes) -> _Answer:
    split = int(request["split"])
    return {}, board.compare_set(str(request["key"]), value[:split], value[split:])


def _delete(board: Board, request: Mapping[str, Any], _: bytes) -> _Answer:
    return {"found": board.delete(str(request["key"]))}, b""


def _wait(board: Board, request: Mapping[str, Any], _: bytes) -> _Answer:
    keys = [str(key) for key in request["keys"]]
    at_least = request.get("at_least")
    found = board.wait_any(keys, float(request["seconds"]), at_least)
    return {"key": found}, b""


_OPERATIONS: dict[str, Callable[[Board, Mapping[str, Any], bytes], _Answer]] = {
    "set": _set,
    "get": _get,
    "add": _add,
    "compare_set": _compare_set,
    "delete": _delete,
    "wait": _wait,
}
