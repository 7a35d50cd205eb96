"""Agreeing over MPI on an address of rank 0 that every rank can reach.

A host's name is no such address: rank 0's own may be 127.0.1.1 or localhost to itself, and of the
addresses of its interfaces others may reach only some, or have the same one themselves (a bridge
of containers). So rank 0 tells all of them, every rank tries each, and one that worked for all is
taken.
"""

from __future__ import annotations

import json
import secrets
import socket
import threading
import time
from contextlib import ExitStack, suppress
from typing import Any

from sapwood.errors import ConfigError, LaunchError
from sapwood.runtime.host import LOOPBACK, given_host
from sapwood.runtime.interfaces import is_loopback, own_addresses, route_to
from sapwood.runtime.launch import Launch

__all__ = ["Exchange", "agree_on_host"]

_POLL = 0.02
_TEXT_BYTES = 4096
_PROBLEM_CHARACTERS = 600
"""Of a message, each of which JSON may write as six bytes; a longer text would be no broadcast."""
_MOST = 32
"""Candidates: each is a bit of a number that all ranks reduce."""
_TRY_SECONDS = 3.0
_TOKEN_BYTES = 16


class Exchange:
    """Collectives of all ranks, each of which ends in time."""

    def __init__(self, world: Any, launch: Launch, timeout: float) -> None:
        """``world`` is MPI's communicator of all ranks."""
        self._world, self._launch, self._timeout = world, launch, timeout

    def share(self, value: Any) -> Any:
        """Rank 0's value, on every rank; as JSON."""
        text = bytearray(_TEXT_BYTES)
        if self._launch.rank == 0:
            encoded = json.dumps(value).encode()
            text[: len(encoded)] = encoded
        self._finish(self._world.Ibcast(text, root=0))
        return json.loads(bytes(text).rstrip(b"\0"))

    def common(self, mask: int) -> int:
        """The bits that every rank has set."""
        from mpi4py import MPI

        mine, all_ = bytearray(mask.to_bytes(_MOST // 8, "little")), bytearray(_MOST // 8)
        self._finish(self._world.Iallreduce([mine, MPI.BYTE], [all_, MPI.BYTE], op=MPI.BAND))
        return int.from_bytes(all_, "little")

    def _finish(self, request: Any) -> None:
        deadline = time.monotonic() + self._timeout
        while not request.Test():
            if time.monotonic() > deadline:
                raise LaunchError(
                    f"rank {self._launch.rank} of {self._launch.world} did not hear from all ranks "
                    f"in {self._timeout:g} s; look for a rank that ended early, or raise timeout="
                )
            time.sleep(_POLL)


def agree_on_host(exchange: Exchange, rank: int) -> str:
    """An address of rank 0 that all ranks have reached.

    Raises:
        LaunchError: there is none.
    """
    with ExitStack() as opened:
        offer = _offer(opened) if rank == 0 else []
        problem, token, places = exchange.share(offer)
        if problem:
            raise LaunchError(problem)
        mask = 0
        for number, (host, port) in enumerate(places):
            mask |= _answers(host, port, token) << number
        common = exchange.common(mask)
    for number, (host, _) in enumerate(places):
        if common >> number & 1:
            return str(host)
    raise LaunchError(
        f"none of rank 0's addresses ({', '.join(host for host, _ in places) or 'it has none'}) is "
        "reached by all ranks; set SAPWOOD_HOST on rank 0 to one that is, or MASTER_ADDR and "
        "MASTER_PORT"
    )


def _offer(opened: ExitStack) -> list[Any]:
    """Listen on every address of rank 0; what it cannot do, token, and addresses with ports."""
    token, places = secrets.token_hex(_TOKEN_BYTES), []
    try:
        candidates = _own()
    except ConfigError as error:  # told to all, who would wait for it otherwise
        return [f"rank 0: {error}"[:_PROBLEM_CHARACTERS], "", []]
    for host in candidates:
        with suppress(OSError):  # an interface that is not up yet
            places.append([host, opened.enter_context(_Trial(host, token)).port])
    return ["", token, places]


def _own() -> list[str]:
    """The addresses of this machine, the likeliest first; loopback serves ranks of one machine."""
    given = given_host()
    if given:
        return [given]
    by_name = route_to(socket.getfqdn())
    likely = [by_name] if by_name and not is_loopback(by_name) else []
    return [*dict.fromkeys([*likely, *own_addresses()])][: _MOST - 1] + [LOOPBACK]


class _Trial:
    """Says a token to whoever connects to one address; its thread ends with the block."""

    def __init__(self, host: str, token: str) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family, backlog=1024)
        self.port = int(self._listener.getsockname()[1])
        self._token = token.encode()
        self._thread = threading.Thread(target=self._serve, name="sapwood-trial", daemon=True)
        self._thread.start()

    def __enter__(self) -> _Trial:
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join(_TRY_SECONDS)
        self._listener.close()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            with connection, suppress(OSError):
                connection.sendall(self._token)


def _answers(host: str, port: int, token: str) -> bool:
    """Whether rank 0 is there, and not another machine that has the same address."""
    wanted = token.encode()
    with suppress(OSError), socket.create_connection((host, port), _TRY_SECONDS) as connection:
        said = b""
        while len(said) < len(wanted) and (more := connection.recv(len(wanted) - len(said))):
            said += more
        return said == wanted
    return False
