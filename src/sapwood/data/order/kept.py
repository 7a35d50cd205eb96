"""What an order has drawn lately: as much as is needed again soon, and no more."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Generic, Protocol, TypeVar

__all__ = ["Kept"]


class Sized(Protocol):
    """Something that says what it takes of memory."""

    @property
    def nbytes(self) -> int:
        """Bytes."""
        ...


T = TypeVar("T", bound=Sized)


class Kept(Generic[T]):
    """The last things that were asked for, within limits of number and bytes.

    A rank that reads for others asks from two threads. There is no lock, as a forked child could
    find it held for ever: at worst something is made twice, or dropped a little early.
    """

    def __init__(self, *, least: int, most: int, nbytes: int) -> None:
        """At least ``least`` things are kept whatever they take, and at most ``most``."""
        self._least, self._most, self._nbytes = least, most, nbytes
        self._items: dict[Hashable, T] = {}

    def get(self, name: Hashable, make: Callable[[], T]) -> T:
        """What was kept by this name, or what ``make`` makes now."""
        found = self._items.pop(name, None)
        new = found is None
        if found is None:
            found = make()
        self._items[name] = found  # as the last one: those that are not asked for go first
        if new:
            self._drop()
        return found

    def _drop(self) -> None:
        items = list(self._items.items())
        total = sum(one.nbytes for _, one in items)
        for at, (name, one) in enumerate(items):
            left = len(items) - at
            if left <= self._least or (left <= self._most and total <= self._nbytes):
                return
            self._items.pop(name, None)
            total -= one.nbytes
