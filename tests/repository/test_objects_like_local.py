"""Whatever is done to a repository, one of objects says the same as one with a database.

Several processes use it at once: here, back ends that remember different things.
"""

from __future__ import annotations

from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from sapwood.errors import SapwoodError
from sapwood.repository.base import ModelRecord
from sapwood.repository.database import Database
from sapwood.repository.local import LocalBackend
from sapwood.repository.names import parse
from sapwood.repository.objects.backend import ObjectBackend
from sapwood.repository.objects.opening import open_objects
from sapwood.storage.memory import MemoryKeeper
from sapwood.testing.repository.common import content, gc, problems_of, read_all, save

NAMES = st.sampled_from(["a", "a/b", "c"])
LABELS = st.sampled_from(["1", "2", "x", "best"])
SEEDS = st.integers(0, 4)
USERS = st.integers(0, 2)
LAYERS = [bytes([n]) * 16 for n in range(3)]


def plain(record: ModelRecord, ids: dict[int, str]) -> tuple[Any, ...]:
    """What both must say; numbers and times differ."""
    parent = ids.get(record.parent) if record.parent is not None else None
    return (
        str(record.reference),
        record.removed is not None,
        parent,
        record.parent_name,
        record.nbytes,
        record.tensors,
        dict(record.metrics),
        record.tags,
        dict(record.note),
    )


class Both(RuleBasedStateMachine):
    @initialize()
    def begin(self) -> None:
        self.keeper = MemoryKeeper()
        first = open_objects(self.keeper, "here", create=True)
        self.users = [first, ObjectBackend("2", self.keeper), ObjectBackend("3", self.keeper)]
        self.local = LocalBackend("memory:", Database(None), MemoryKeeper())
        self.ids: list[dict[int, str]] = [{}, {}]
        self.count = 0

    def both(self, user: int, work: Any) -> Any:
        told: list[Any] = []
        for which, backend in enumerate((self.local, self.users[user])):
            try:
                told.append(work(backend, self.ids[which]))
            except SapwoodError as error:
                told.append(type(error).__name__)
        assert told[0] == told[1]
        return told[0]

    @rule(user=USERS, name=NAMES, label=LABELS | st.none(), seeds=st.lists(SEEDS, max_size=3),
          parent=NAMES | st.none(), tag=LABELS | st.none())  # fmt: skip
    def save(
        self, user: int, name: str, label: str | None, seeds: list[int], parent: str | None,
        tag: str | None,
    ) -> None:  # fmt: skip
        self.count += 1
        unique = f"save {self.count}"

        def work(backend: Any, ids: dict[int, str]) -> Any:
            tensors = {f"t{n}": content(seed, 500 + seed) for n, seed in enumerate(seeds)}
            record = save(
                backend, name if label is None else f"{name}@{label}", tensors, parent=parent,
                tags=[tag] if tag else [], metrics={"m": float(sum(seeds))}, note={"n": unique},
                layers={LAYERS[n]: 10 * n + 1 for n in set(seeds) if n < len(LAYERS)},
            )  # fmt: skip
            ids[record.id] = unique
            return plain(record, ids)

        self.both(user, work)

    @rule(user=USERS, name=NAMES, label=LABELS | st.none())
    def remove(self, user: int, name: str, label: str | None) -> None:
        text = name if label is None else f"{name}@{label}"
        self.both(user, lambda backend, ids: plain(backend.remove(parse(text)), ids))

    @rule(user=USERS, name=NAMES, label=LABELS, tag=LABELS)
    def tag(self, user: int, name: str, label: str, tag: str) -> None:
        self.both(user, lambda b, ids: plain(b.tag(parse(f"{name}@{label}"), tag), ids))

    @rule(user=USERS, name=NAMES, tag=LABELS)
    def untag(self, user: int, name: str, tag: str) -> None:
        self.both(user, lambda backend, ids: backend.untag(name, tag))

    @rule(user=USERS)
    def sweep(self, user: int) -> None:
        def work(backend: Any, ids: dict[int, str]) -> int:
            backend.flush()
            return int(gc(backend).live)

        self.both(user, work)
        assert gc(self.users[user]).packs == 0

    @rule(user=USERS)
    def come_anew(self, user: int) -> None:
        self.users[user] = ObjectBackend("new", self.keeper)

    @rule(user=USERS, name=NAMES, label=LABELS | st.none())
    def look(self, user: int, name: str, label: str | None) -> None:
        text = name if label is None else f"{name}@{label}"
        self.both(user, lambda backend, ids: plain(backend.find(parse(text)), ids))
        self.both(user, lambda backend, ids: read_all(backend, text))

    @rule(user=USERS, layers=st.lists(st.sampled_from(LAYERS), unique=True), lower=st.booleans())
    def kin(self, user: int, layers: list[bytes], lower: bool) -> None:
        def work(backend: Any, ids: dict[int, str]) -> Any:
            found = backend.kin(layers, "*", 100, "m", lower)
            return sorted((str(k.record.reference), k.layers, k.nbytes) for k in found)

        self.both(user, work)

    @rule(user=USERS, name=NAMES)
    def family(self, user: int, name: str) -> None:
        def work(backend: Any, ids: dict[int, str]) -> Any:
            record = backend.find(parse(name))
            found = [plain(backend.by_id(record.id, name), ids)]
            return found + sorted(plain(one, ids) for one in backend.children(record.id))

        self.both(user, work)

    @invariant()
    def agree(self) -> None:
        if not hasattr(self, "users"):
            return
        for user in range(3):
            self.both(user, lambda b, ids: sorted(plain(r, ids) for r in b.models()))

    def teardown(self) -> None:
        if hasattr(self, "users"):
            assert problems_of(self.users[0]) == problems_of(ObjectBackend("x", self.keeper)) == []
            self.local.close()


TestBoth = Both.TestCase
TestBoth.settings = settings(max_examples=12, stateful_step_count=25, deadline=None)
