"""What both sides of a fork tell each other while it is under way, through a store they share.

posted      clones that are ready to receive
opened      donors that are ready to send
fire        the step whose state is sent
extras/n    the file with what donor n has beside tensors, in a fork through files
ready       all clones have begun
failed      none does, and why
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from sapwood.errors import CloneError, DeadlineError
from sapwood.runtime.bounded import BoundedStore
from sapwood.runtime.stores import PrefixStore, Store, TCPStore

__all__ = ["Session", "dial"]

_FIRST_PAUSE, _LAST_PAUSE = 0.001, 0.05
_LONGEST = 7 * 2**20
"""At 8 MiB torch's store drops the connection, and with it all forks of the run to come."""


def dial(host: str, port: int, timeout: float) -> Store:
    """Reach the store that donor 0 hosts.

    Raises:
        CloneError: nobody answers there.
    """
    try:
        return TCPStore(
            host,
            port,
            is_master=False,
            timeout=timedelta(seconds=timeout),
            wait_for_workers=False,
        )
    except RuntimeError as error:
        first = str(error).partition("\n")[0]
        raise CloneError(f"cannot reach the donors' store at {host}:{port}: {first}") from error


class Session:
    """One side's view of one fork; every call ends in time."""

    def __init__(self, store: Store, name: str, *, timeout: float) -> None:
        """``name`` is secret: who knows it takes part."""
        self.name = name
        self.raw = PrefixStore(f"clone/{name}", store)
        self.store = BoundedStore(self.raw, timeout)
        self._timeout = timeout

    def count(self, key: str) -> int:
        """Say that this side has come so far; how many have."""
        return int(self._try(lambda: self.store.add(key, 1)))

    def counted(self, key: str) -> int:
        """How many have come so far."""
        return int(self._try(lambda: self.store.add(key, 0)))

    def say(self, key: str, value: Any) -> None:
        """Leave a plain value.

        Raises:
            CloneError: the store is gone, or would break off at a value of this size.
        """
        text = json.dumps(value)
        if len(text) > _LONGEST:
            raise CloneError(
                f"{key} has {len(text)} bytes, the store of a fork takes at most {_LONGEST}"
            )
        self._try(lambda: self.store.set(key, text))

    def heard(self, key: str) -> Any:
        """What was left, or None."""
        if not self._try(lambda: self.store.has(key)):
            return None
        return json.loads(self._try(lambda: self.store.get(key)))

    def fail(self, why: str) -> None:
        """Nobody shall begin; the first reason counts."""
        try:
            self.store.compare_set("failed", "", json.dumps(why), timeout=1.0)
        except (DeadlineError, RuntimeError):
            return  # they are gone, and need no word

    def check(self) -> None:
        """Raise if the fork has failed.

        Raises:
            CloneError: it has.
        """
        why = self.heard("failed")
        if why is not None:
            raise CloneError(str(why))

    def until(self, test: Callable[[], Any], what: str, timeout: float) -> Any:
        """Wait until ``test`` gives something.

        Raises:
            CloneError: the fork failed meanwhile, or it took longer than ``timeout`` seconds.
        """
        deadline = time.monotonic() + timeout
        pause = _FIRST_PAUSE
        while not (found := test()):
            self.check()
            if time.monotonic() > deadline:
                raise CloneError(f"{what}: nothing for {timeout:g} s")
            time.sleep(pause)
            pause = min(pause * 1.5, _LAST_PAUSE)
        return found

    def hear(self, key: str, what: str, timeout: float) -> Any:
        """Wait until a value is left.

        Raises:
            CloneError: the fork failed meanwhile, or it took longer than ``timeout`` seconds.
        """
        return self.until(lambda: self.heard(key), what, timeout)

    def close(self) -> None:
        """Ask no more."""
        self.store.close()

    def _try(self, act: Callable[[], Any]) -> Any:
        try:
            return act()
        except DeadlineError as error:
            raise CloneError(f"the other side has not answered for {self._timeout:g} s") from error
        except RuntimeError as error:
            first = str(error).partition("\n")[0]
            raise CloneError(f"the donors' store is gone: {first}") from error
