"""What the checks of a keeper have in common."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from sapwood.storage.base import Keeper, Wanted

__all__ = ["Opener", "content", "expect", "keys_in", "opened", "read_at"]

Opener = Callable[[], Keeper]
"""Opens the place that is checked; each time the same one, also in another process if it is shared
between processes."""


def content(seed: int, nbytes: int) -> bytes:
    """Bytes that no other seed gives."""
    return np.random.default_rng(seed).bytes(nbytes)


@contextmanager
def opened(opener: Opener) -> Iterator[Keeper]:
    """A keeper, closed at the end."""
    with opener() as keeper:
        yield keeper


@contextmanager
def expect(kind: type[BaseException], what: str) -> Iterator[None]:
    """See that a block raises; ``what`` says in the failure what was done."""
    try:
        yield
    except kind:
        return
    except Exception as error:
        raise AssertionError(
            f"{what}: expected {kind.__name__}, got {type(error).__name__}: {error}"
        ) from error
    raise AssertionError(f"{what}: expected {kind.__name__}, but it went through")


def read_at(keeper: Keeper, key: str, start: int, nbytes: int) -> bytes:
    """A range by itself."""
    out = bytearray(nbytes)
    keeper.read([Wanted(key, start, out)])
    return bytes(out)


def keys_in(keeper: Keeper, folder: str = "") -> list[Any]:
    """The keys of a list."""
    return [entry.key for entry in keeper.list(folder)]
