"""What really goes over the wire: a TCP proxy before a server, which counts."""

from __future__ import annotations

import select
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from urllib.parse import urlsplit

_METHODS = (b"GET ", b"PUT ", b"POST ", b"HEAD ", b"DELETE ")


@dataclass
class Wire:
    """Requests by method, and bytes, headers included."""

    endpoint: str
    requests: list[str] = field(default_factory=list)
    sent: int = 0
    received: int = 0

    def reset(self) -> None:
        self.requests.clear()
        self.sent = self.received = 0


@contextmanager
def counted(endpoint: str) -> Iterator[Wire]:
    """A proxy before ``endpoint``; requests of one connection follow each other."""
    target = urlsplit(endpoint)
    listener = socket.create_server(("127.0.0.1", 0))
    wire = Wire(f"http://127.0.0.1:{listener.getsockname()[1]}")
    ends: list[socket.socket] = []
    threads: list[threading.Thread] = []
    lock = threading.Lock()

    def serve(client: socket.socket) -> None:
        assert target.hostname is not None
        server = socket.create_connection((target.hostname, target.port or 80))
        with lock:
            ends.extend((client, server))
        with suppress(OSError, ValueError):
            while True:
                for end in select.select([client, server], [], [])[0]:
                    data = end.recv(2**20)
                    if not data:
                        raise OSError
                    note(end is client, data)
                    (server if end is client else client).sendall(data)
        client.close()
        server.close()

    def note(sent: bool, data: bytes) -> None:
        with lock:
            if not sent:
                wire.received += len(data)
                return
            wire.sent += len(data)
            if data.startswith(_METHODS):
                wire.requests.append(data.partition(b" ")[0].decode())

    def accept() -> None:
        with suppress(OSError):
            while True:
                client, _ = listener.accept()
                one = threading.Thread(target=serve, args=(client,))
                threads.append(one)
                one.start()

    first = threading.Thread(target=accept)
    first.start()
    try:
        yield wire
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        first.join()
        for end in ends:
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        for one in threads:
            one.join()
