"""A process that serves providers, as many as a test asks for by lines on its standard input.

open PLACE TLS     serves one; prints its address
close              ends all
"""

from __future__ import annotations

import sys
from contextlib import ExitStack
from pathlib import Path

from sapwood.channel.handshake import key_of
from sapwood.channel.listener import Limits
from sapwood.channel.tls import server_context
from sapwood.repository.providers.local import open_provider
from sapwood.repository.providers.rights import Rights, owner_rights
from sapwood.repository.providers.server import ProviderServer

TOKEN = "the-token-of-the-owner"
READER, WRITER, STRANGER = "the-token-of-a-reader", "the-token-of-a-writer", "nobody-has-this-one"
RIGHTS = {
    TOKEN: owner_rights(),
    READER: Rights("reader", {"a/*": frozenset({"read"})}),
    WRITER: Rights("writer", {"a/*": frozenset({"read", "write"}), "b": frozenset({"write"})}),
}
CHANNEL = Path(__file__).parents[2] / "channel"


def main() -> None:
    tls = server_context(CHANNEL / "server.cert.pem", CHANNEL / "server.key.pem")
    tokens = {key_of(token): (token, rights) for token, rights in RIGHTS.items()}
    with ExitStack() as stack:
        for line in sys.stdin:
            verb, *words = line.split()
            if verb == "close":
                stack.close()
                print("closed", flush=True)
                continue
            provider = open_provider(words[0], memory=2**30 if words[0] == "memory:" else None)
            stack.callback(provider.close)
            secured = tls if words[1] == "tls" else None
            limits = Limits(timeout=5.0, greeting=5.0)
            server = ProviderServer(provider, tokens, tls=secured, limits=limits)
            stack.callback(server.close)
            print(server.address, flush=True)


if __name__ == "__main__":
    main()
