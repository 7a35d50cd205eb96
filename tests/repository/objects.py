"""A back end of objects in memory, and looking at and changing what is in it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from sapwood.repository.objects.backend import ObjectBackend
from sapwood.repository.objects.opening import open_objects
from sapwood.storage import Keeper
from sapwood.storage.memory import MemoryKeeper

__all__ = ["again", "backend", "change", "keys", "opened"]


@contextmanager
def opened(keeper: Keeper) -> Iterator[ObjectBackend]:
    backend = open_objects(keeper, "here", create=True)
    try:
        yield backend
    finally:
        backend.close()


@pytest.fixture
def backend() -> Iterator[ObjectBackend]:
    with opened(MemoryKeeper()) as one:
        yield one


def again(backend: ObjectBackend) -> ObjectBackend:
    """The same place, by somebody who remembers nothing; not to be closed."""
    return ObjectBackend("here", backend.keeper)


def keys(backend: ObjectBackend, folder: str) -> list[str]:
    return [entry.key for entry in backend.keeper.list(folder)]


def change(backend: ObjectBackend, key: str, data: bytes) -> None:
    backend.keeper.put(key, [data], replace=True)
