"""Mutual proof that both sides know a token, before anything else is said.

Each side sends a random number and a keyed hash of both numbers. The token itself is never sent; a
public hash of it tells a server that knows several tokens which one is meant. This keeps strangers
out. It does not encrypt: use TLS, or a network you trust.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from collections.abc import Callable, Mapping
from typing import Any

from sapwood.channel.connection import ChannelError, Connection

__all__ = ["Refused", "greet_client", "greet_server", "key_of"]

PROTOCOL = "sapwood-channel/1"
HELLO_LIMIT = 1024
"""Bytes of a message of somebody who has not shown the token yet."""
_HEX = re.compile(r"[0-9a-f]{1,128}")
_NOBODY = secrets.token_hex(32)
"""Stands for an unknown token, such that refusing it takes as long as refusing a wrong proof."""


class Refused(ChannelError):
    """One side does not know the token."""


def key_of(token: str) -> str:
    """The public name of a token; the token cannot be found from it."""
    return hashlib.blake2b(token.encode(), digest_size=8, person=b"sapwood-key").hexdigest()


def greet_client(
    connection: Connection,
    token_of: Callable[[str], str | None],
    *,
    seconds: float,
    admit: Callable[[], None] = lambda: None,
) -> None:
    """The server's side; all of it may take ``seconds``.

    ``token_of`` gives the token for a ``key_of``. ``connection.key`` says afterwards which one the
    client knows. ``admit`` is called when the client has proven it, and before it is told: what
    raises there ends the greeting, and the client knows that it was not let in.

    Raises:
        Refused: the client does not know the token it names.
        OSError: it is gone, too slow, or speaks something else.
    """
    mine = secrets.token_hex(16)
    with connection.within(seconds):
        connection.send({"protocol": PROTOCOL, "nonce": mine})
        answer = connection.receive(limit=HELLO_LIMIT)
        key, theirs = _word(answer, "key"), _word(answer, "nonce")
        token = token_of(key)
        if not _proven(token or _NOBODY, "client", mine, theirs, answer) or token is None:
            connection.send({"error": "wrong token"})
            raise Refused("it does not know the token")
        admit()
        connection.send({"proof": _proof(token, "server", mine, theirs)})
    connection.key = key


def greet_server(connection: Connection, token: str, *, seconds: float | None = None) -> None:
    """The client's side; all of it may take ``seconds``, by default the connection's timeout.

    Raises:
        Refused: the server does not take the token, or does not know it itself.
        OSError: it is gone, too slow, or speaks something else.
    """
    with connection.within(connection.timeout if seconds is None else seconds):
        hello = connection.receive(limit=HELLO_LIMIT)
        if "error" in hello:
            raise ChannelError(str(hello["error"]))
        if hello.get("protocol") != PROTOCOL:
            raise ChannelError(f"it speaks {hello.get('protocol')!r}, not {PROTOCOL!r}")
        theirs, mine, key = _word(hello, "nonce"), secrets.token_hex(16), key_of(token)
        proof = _proof(token, "client", theirs, mine)
        connection.send({"nonce": mine, "key": key, "proof": proof})
        answer = connection.receive(limit=HELLO_LIMIT)
        if "error" in answer:
            raise Refused(f"it refused us: {answer['error']}")
        if not _proven(token, "server", theirs, mine, answer):
            raise Refused("it does not know the token itself")
    connection.key = key


def _proof(token: str, side: str, server: str, client: str) -> str:
    text = f"{PROTOCOL} {side} {server} {client}"
    return hmac.new(token.encode(), text.encode(), "sha256").hexdigest()


def _proven(token: str, side: str, server: str, client: str, answer: Mapping[str, Any]) -> bool:
    try:
        shown = _word(answer, "proof")
    except ChannelError:  # none is as good as a wrong one
        return False
    return hmac.compare_digest(_proof(token, side, server, client), shown)


def _word(message: Mapping[str, Any], name: str) -> str:
    """One of the numbers that are exchanged.

    Raises:
        ChannelError: it is none, and who sent it speaks something else.
    """
    word = message.get(name)
    if not isinstance(word, str) or not _HEX.fullmatch(word):
        raise ChannelError(f"it sent no {name}")
    return word
