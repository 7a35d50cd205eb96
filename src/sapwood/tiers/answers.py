"""What a peer server does for a client that knows the token."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from sapwood.channel.connection import BLOCK_BYTES, ChannelError, Connection
from sapwood.errors import SapwoodError
from sapwood.runtime import faults
from sapwood.tiers.blobs import BlobFile, BlobFolder
from sapwood.tiers.keeper import Blob

__all__ = ["RECORD_LIMIT", "Answers"]

RECORD_LIMIT = 64 * 2**20
"""A record is taken into memory, so it may not be of any size."""


class Answers:
    """Answers requests from a folder of blobs; for any number of connections at a time."""

    def __init__(self, blobs: BlobFolder) -> None:
        """``blobs`` is what clients see."""
        self._blobs = blobs

    def answer(self, connection: Connection, request: Mapping[str, Any]) -> None:
        """Do what a request asks for, and say what came of it.

        Raises:
            ChannelError: it is no request; the connection is of no more use.
        """
        operation = self._operations().get(str(request.get("op")))
        if operation is None:
            raise ChannelError(f"operation {request.get('op')!r} is not known")
        operation(connection, request)

    def _operations(self) -> dict[str, Callable[[Connection, Mapping[str, Any]], None]]:
        return {
            "ping": lambda connection, _: connection.send({"ok": True}),
            "put": self._put,
            "list": self._list,
            "read": self._read,
            "drop": self._drop,
        }

    def _list(self, connection: Connection, request: Mapping[str, Any]) -> None:
        try:
            found = self._blobs.names(str(request.get("area")), str(request.get("group") or ""))
        except SapwoodError as error:
            connection.send(_said(error))
            return
        body = json.dumps([[blob.group, blob.name] for blob in found]).encode()
        connection.send({"nbytes": len(body)})
        connection.send_bytes(body)

    def _read(self, connection: Connection, request: Mapping[str, Any]) -> None:
        suffix = "json" if request.get("part") == "record" else "bin"
        nbytes = request.get("nbytes")
        try:
            count = None if nbytes is None else _whole(nbytes)
            part = self._blobs.open_part(
                _blob(request), suffix, _whole(request.get("start")), count
            )
        except SapwoodError as error:
            connection.send(_said(error))
            return
        with part.file:
            size = part.start + part.nbytes if request.get("part") == "size" else part.nbytes
            connection.send({"nbytes": size})
            if request.get("part") == "size":
                return
            try:
                connection.send_file(part.file, part.start, part.nbytes)
            except OSError:
                # The other side waits for bytes: whatever it is told now, it would take for them.
                connection.abort()
                raise

    def _drop(self, connection: Connection, request: Mapping[str, Any]) -> None:
        try:
            self._blobs.drop(str(request.get("area")), str(request.get("group")))
        except SapwoodError as error:
            connection.send(_said(error))
            return
        connection.send({"ok": True})

    def _put(self, connection: Connection, request: Mapping[str, Any]) -> None:
        nbytes = _whole(request.get("nbytes"))
        try:
            file = self._blobs.put(_blob(request), nbytes)
        except SapwoodError as error:
            connection.send(_said(error))
            return
        try:
            connection.send({"ok": True})
            connection.send(_received(connection, file, nbytes))
        finally:
            file.close()


def _received(connection: Connection, file: BlobFile, nbytes: int) -> dict[str, Any]:
    """Take a blob and its record; the answer to send.

    When the disk fails, the rest is still taken and thrown away: only so is the answer heard.
    """
    problem: SapwoodError | None = None
    buffer = memoryview(bytearray(min(nbytes, BLOCK_BYTES)))
    for start in range(0, nbytes, BLOCK_BYTES):
        block = buffer[: min(BLOCK_BYTES, nbytes - start)]
        connection.receive_into(block)
        faults.point("peers.receive", at=start)
        try:
            if problem is None:
                file.write(block)
        except SapwoodError as error:
            problem = error
    size = _whole(connection.receive().get("record"))
    if size > RECORD_LIMIT:
        raise ChannelError(
            f"a record of {size} bytes was announced, at most {RECORD_LIMIT} are taken"
        )
    record = bytearray(size)
    connection.receive_into(record)
    if problem is None:
        try:
            file.seal(bytes(record))
        except SapwoodError as error:
            problem = error
    return {"ok": True} if problem is None else _said(problem)


def _said(error: SapwoodError) -> dict[str, Any]:
    return {"error": str(error), "kind": type(error).__name__}


def _blob(request: Mapping[str, Any]) -> Blob:
    area, group, name = (str(request.get(part)) for part in ("area", "group", "name"))
    return Blob(area, group, name)


def _whole(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ChannelError(f"{value!r} is not a number of bytes")
    return value
