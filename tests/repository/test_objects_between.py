"""What others do between any two requests of a gc or a save, in every order chance finds."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from typing import Any

import pytest

from sapwood.errors import Gone, ModelNotFound
from sapwood.repository.names import parse
from sapwood.repository.objects.backend import ObjectBackend
from sapwood.repository.objects.opening import open_objects
from sapwood.storage.memory import MemoryKeeper
from sapwood.testing.repository.common import content, gc, problems_of, read_all, references, save

SIZES = (100, 3000, 20_000)


class Busy(MemoryKeeper):
    """Before each of one user's requests somebody else has a turn."""

    def __init__(self) -> None:
        super().__init__()
        self.turn: Callable[[], None] = lambda: None
        self._inside = threading.Lock()

    def between(self) -> None:
        if self._inside.acquire(blocking=False):
            try:
                self.turn()
            finally:
                self._inside.release()

    def begin(self, *args: Any, **options: Any) -> Any:
        self.between()
        return super().begin(*args, **options)

    def get(self, *args: Any, **options: Any) -> bytes:
        self.between()
        return super().get(*args, **options)

    def size(self, key: str) -> int:
        self.between()
        return super().size(key)

    def read(self, wanted: Any) -> None:
        self.between()
        super().read(wanted)

    def list(self, folder: str = "") -> Any:
        self.between()
        return super().list(folder)

    def remove(self, keys: Any, **options: Any) -> None:
        self.between()
        super().remove(keys, **options)


class World:
    """Some users of one place, of which each remembers something else."""

    def __init__(self, seed: int) -> None:
        self.keeper = Busy()
        self.chance = random.Random(seed)
        first = open_objects(self.keeper, "here", create=True)
        self.users = [first, *(ObjectBackend("other", self.keeper) for _ in range(3))]
        self.count = 0
        self.there: dict[str, dict[str, bytes]] = {}

    def act(self, user: ObjectBackend) -> None:
        kind = self.chance.choice(["save", "remove", "remove", "read", "gc"])
        known = sorted(self.there)
        if kind == "save":
            self.save(user)
        elif kind == "gc":
            gc(user, quiet=3600.0)
        elif known and kind == "remove":
            reference = self.chance.choice(known)
            del self.there[reference]
            user.remove(parse(reference))
        elif known:
            reference = self.chance.choice(known)
            assert read_all(user, reference) == self.there[reference]

    def save(self, user: ObjectBackend) -> None:
        """New, old and mixed bytes: few of them, so that much is shared and much is dropped."""
        self.count += 1
        reference = f"m{self.count % 3}@{self.count}"
        tensors = {
            f"t{n}": content(self.chance.randrange(3) * 10 + n, size)
            for n, size in enumerate(SIZES)
            if self.chance.random() < 0.7
        }
        parent = self.chance.choice(sorted(self.there)) if self.there else None
        try:
            save(user, reference, tensors, parent=parent)
        except (ModelNotFound, Gone):
            return  # its parent was removed in between
        self.there[reference] = tensors

    def check(self) -> None:
        self.keeper.turn = lambda: None
        for user in (*self.users, ObjectBackend("new", self.keeper)):
            assert sorted(references(user)) == sorted(self.there)
            for reference, tensors in self.there.items():
                assert read_all(user, reference) == tensors, reference
            assert problems_of(user) == []


@pytest.mark.parametrize("seed", range(6))
def test_in_any_order(seed: int) -> None:
    world = World(seed)
    for turn in range(25):
        one, *others = world.chance.sample(world.users, 3)
        share = world.chance.choice([0.05, 0.3, 0.7])

        def between(others: list[ObjectBackend] = others, share: float = share) -> None:
            if world.chance.random() < share:
                world.act(world.chance.choice(others))

        world.keeper.turn = between
        if turn % 2:
            gc(one, quiet=3600.0)
        else:
            world.save(one)
        world.keeper.turn = lambda: None
        if turn % 5 == 4:
            world.check()
    world.check()
    for user in world.users:
        gc(user)
        world.check()
    assert gc(world.users[0]).packs == 0
