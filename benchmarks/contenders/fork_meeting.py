"""Where the two groups of a fork meet: a store that the parent hosts, beside every contender.

A turn has keys of its own. Who waits in it neither spins nor outlives it: when one side fails, the
other is told within a second.
"""

from __future__ import annotations

import json
import time
from datetime import timedelta
from typing import Any

from torch.distributed import DistStoreError, PrefixStore, Store, TCPStore

WAIT = 90.0
"""Seconds until whatever the other side does must have happened."""
SLICE = timedelta(seconds=1)


class OtherSideFailed(Exception):
    """The other side of a fork has given up."""


def host(address: str = "127.0.0.1") -> TCPStore:
    """The parent's store; its address and port tell the ranks where it is."""
    timeout = timedelta(seconds=WAIT)
    return TCPStore(address, 0, is_master=True, wait_for_workers=False, timeout=timeout)


def visit(port: int, address: str = "127.0.0.1") -> TCPStore:
    timeout = timedelta(seconds=WAIT)
    return TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=timeout)


class Turn:
    """What both sides tell each other in one turn."""

    def __init__(self, store: Store, number: int) -> None:
        self.number = number
        self.store = PrefixStore(f"turn/{number}", store)

    def say(self, key: str, value: Any = None) -> None:
        self.store.set(key, json.dumps(value))

    def heard(self, key: str) -> bool:
        return bool(self.store.check([key]))

    def hear(self, key: str, wait: float = WAIT) -> Any:
        """What was said, as soon as it is.

        Raises:
            OtherSideFailed: it never will be.
        """
        deadline = time.monotonic() + wait
        while True:
            try:
                self.store.wait([key], SLICE)
                return json.loads(self.store.get(key))
            except DistStoreError:
                self.check()
                if time.monotonic() > deadline:
                    raise OtherSideFailed(f"nobody said {key!r} for {wait:.0f} s") from None

    def count(self, key: str, world: int) -> None:
        """One more of ``world`` has come so far; the last one says ``key``."""
        if self.store.add(f"{key}/count", 1) == world:
            self.say(key)

    def fail(self, why: str) -> None:
        self.say("failed", why)

    def check(self) -> None:
        if self.heard("failed"):
            raise OtherSideFailed(json.loads(self.store.get("failed")))
