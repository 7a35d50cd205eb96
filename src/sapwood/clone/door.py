"""Where a running job is asked for a clone: rank 0 listens, and lets in who knows the token.

The address is in the run's folder, the token in a file beside it that only this user can read.
"""

from __future__ import annotations

import json
import logging
import platform
import secrets
import socket
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sapwood.errors import CloneError
from sapwood.runtime.textfile import replace_text
from sapwood.runtime.wire import Connection, Refused

__all__ = ["Address", "Door", "ask"]

log = logging.getLogger(__name__)
ADDRESS, TOKEN = "address", "token"
_TIMEOUT = 10.0
_REQUEST_LIMIT = 2**20
_VISITORS = 16
"""More than that at a time are sent away: none of them stays long."""

Request = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """Where the door of a run is."""

    host: str
    port: int
    node: str
    """The machine's own name: who is on it need not go through the network."""
    token_file: str

    @classmethod
    def read(cls, folder: Path) -> Address:
        """What a run's folder says.

        Raises:
            CloneError: the run takes no clones, or its folder is damaged.
        """
        path = folder / ADDRESS
        try:
            return cls(**json.loads(path.read_text()))
        except FileNotFoundError:
            raise CloneError(
                f"the run in {folder} takes no clones: it has ended, or it did not call "
                "run.allow_clones()"
            ) from None
        except (OSError, ValueError, TypeError) as error:
            raise CloneError(f"{path} is damaged: {error}") from error

    def token(self) -> str:
        """The token.

        Raises:
            CloneError: it cannot be read.
        """
        try:
            return Path(self.token_file).read_text().strip()
        except OSError as error:
            raise CloneError(
                f"cannot read the run's token in {self.token_file}: {error.strerror or error}; "
                "only the user who runs it can"
            ) from error

    @property
    def nearest(self) -> str:
        """The host to connect to from here."""
        return "127.0.0.1" if self.node == platform.node() else self.host


class Door:
    """Listens until closed; ``answer`` turns a request into an answer, on the door's threads."""

    def __init__(
        self, folder: Path, host: str, answer: Callable[[Request], dict[str, Any]]
    ) -> None:
        """Listen, and leave the address and a new token in the run's folder."""
        self._folder = folder
        self._answer = answer
        self._token = secrets.token_hex(16)
        self._listener = socket.create_server(("", 0), backlog=_VISITORS)
        self._room = threading.BoundedSemaphore(_VISITORS)
        self._closed = False
        self.host = host
        address = Address(
            host=host,
            port=self._listener.getsockname()[1],
            node=platform.node(),
            token_file=str((folder / TOKEN).resolve()),
        )
        replace_text(folder / TOKEN, self._token, mode=0o600)
        replace_text(folder / ADDRESS, json.dumps(asdict(address)))
        self._thread = threading.Thread(target=self._listen, name="sapwood-door", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Take the address away and listen no more."""
        self._closed = True
        for name in (ADDRESS, TOKEN):
            with suppress(OSError):
                (self._folder / name).unlink()
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(5.0)

    def _listen(self) -> None:
        while not self._closed:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            if not self._room.acquire(blocking=False):
                sock.close()
                continue
            threading.Thread(target=self._attend, args=(sock,), daemon=True).start()

    def _attend(self, sock: socket.socket) -> None:
        try:
            visitor = Connection(sock, timeout=_TIMEOUT)
            visitor.accept_from(self._token)
            request = visitor.receive(limit=_REQUEST_LIMIT)
            try:
                visitor.send(self._answer(request))
            except (CloneError, KeyError, TypeError, ValueError) as error:
                visitor.send({"error": f"{error}"})
        except Refused as error:
            log.warning("somebody asked for a clone in vain: %s", error)
        except OSError as error:
            log.info("somebody asked for a clone and went: %s", error)
        finally:
            sock.close()
            self._room.release()


def ask(address: Address, request: Request) -> dict[str, Any]:
    """Ask the run at an address, and return its answer.

    Raises:
        CloneError: it cannot be reached, or refuses.
    """
    where = f"{address.nearest}:{address.port}"
    token = address.token()
    try:
        with socket.create_connection((address.nearest, address.port), _TIMEOUT) as sock:
            door = Connection(sock, timeout=_TIMEOUT)
            door.introduce(token)
            door.send(request)
            answer = door.receive(limit=_REQUEST_LIMIT)
    except Refused as error:
        raise CloneError(
            f"the run at {where} does not take the token in {address.token_file} ({error}); fork "
            "from the folder of the run that is running now"
        ) from error
    except OSError as error:
        raise CloneError(
            f"the run at {where} does not answer ({error.strerror or error}); is it still running?"
        ) from error
    if "error" in answer:
        raise CloneError(f"the run refuses: {answer['error']}")
    return answer
