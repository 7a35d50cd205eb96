"""Accepts clone connections and authenticates them: rank 0 of a run that lets itself be forked.

The address is in the run's folder, the token in a file beside it that only this user can read. One
port serves both the request for a fork and the board on which both sides then tell each other what
they need.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from sapwood.channel.connection import ChannelError, Connection
from sapwood.channel.dial import dial_tcp
from sapwood.channel.handshake import Refused, key_of
from sapwood.channel.listener import Limits, Listener, bind_tcp
from sapwood.clone.address import ADDRESS, REMEDY, TOKEN, Address
from sapwood.clone.board import Board
from sapwood.clone.remote import MESSAGE_LIMIT, answer_board
from sapwood.errors import CloneError, ConfigError
from sapwood.runtime.host import bind_for, machine_key
from sapwood.runtime.textfile import replace_text

__all__ = ["ForkListener", "Request", "ask"]

_TIMEOUT = 10.0
_IDLE_SECONDS = 600.0
"""A client that wants nothing for so long is sent away; it comes back when it wants something."""
_CLIENTS = 8192
"""Each rank of both sides has a few connections."""

Request = Mapping[str, Any]


class ForkListener:
    """Listens until closed; ``answer`` turns a request into an answer, on the client's thread."""

    def __init__(
        self,
        folder: Path,
        *,
        host: str,
        token: str,
        board: Board,
        answer: Callable[[Request], dict[str, Any]],
    ) -> None:
        """Listen where ``host`` leads; leave it, the port and the token in the run's folder.

        Raises:
            ConfigError: it cannot listen there, or cannot write to the folder.
        """
        bind = bind_for(host)
        self._folder, self._board, self._answer = folder, board, answer
        self._listener = Listener(
            bind_tcp(bind),
            {key_of(token): token}.get,
            self._serve,
            name="sapwood-fork-listener",
            limits=Limits(proven=_CLIENTS, timeout=_TIMEOUT),
        )
        self.address = Address(
            host=host,
            port=self._listener.port,
            node=platform.node(),
            token_file=str((folder / TOKEN).resolve()),
            machine=machine_key(),
            bind=bind,
        )
        try:
            replace_text(folder / TOKEN, token, mode=0o600)
            replace_text(folder / ADDRESS, self.address.encode())
        except OSError as error:
            self.close()
            raise ConfigError(
                f"forks find a run by its folder, and {folder} cannot be written: "
                f"{error.strerror or error}; give Run another folder="
            ) from error

    def close(self) -> None:
        """Take the address away and listen no more."""
        for name in (ADDRESS, TOKEN):
            with suppress(OSError):
                (self._folder / name).unlink()
        self._board.close()
        self._listener.close()

    def _serve(self, connection: Connection) -> None:
        while True:
            request = connection.receive(limit=MESSAGE_LIMIT, timeout=_IDLE_SECONDS)
            try:
                if not answer_board(self._board, connection, request):
                    connection.send(self._answer(request))
            except (CloneError, KeyError, TypeError, ValueError) as error:
                connection.send({"error": f"{error}"})


def ask(address: Address, request: Request) -> dict[str, Any]:
    """Ask the run at an address, and return its answer.

    Raises:
        CloneError: it cannot be reached, or refuses.
    """
    address.check_reach()
    where = f"{address.nearest}:{address.port}"
    token = address.token()
    try:
        connection = dial_tcp(address.nearest, address.port, token, timeout=_TIMEOUT)
        try:
            connection.send(request)
            answer = connection.receive(limit=MESSAGE_LIMIT)
        finally:
            connection.close()
    except Refused as error:
        raise CloneError(
            f"the run at {where} does not take the token in {address.token_file} ({error}); fork "
            "from the folder of the run that is running now"
        ) from error
    except (ChannelError, OSError) as error:
        apart = address.machine != machine_key()
        hint = f" If so, this machine cannot reach it: start it with {REMEDY}" if apart else ""
        raise CloneError(
            f"the run at {where} does not answer ({error.strerror or error}); is it still running?"
            + hint
        ) from error
    if "error" in answer:
        raise CloneError(f"the run refuses: {answer['error']}")
    return answer
