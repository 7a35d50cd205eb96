"""Checks of parents, children and common layers."""

from __future__ import annotations

from sapwood.errors import Damaged, ModelNotFound
from sapwood.repository.names import parse
from sapwood.testing.repository.common import Opener, content, expect, opened, save

__all__ = ["check_kin", "check_lineage"]


def check_lineage(opener: Opener) -> None:
    """A parent is known by its children, also once it was removed."""
    with opened(opener) as backend:
        root = save(backend, "l/root@1", {"t": content(1, 100)})
        one = save(backend, "l/one@1", {"t": content(1, 100)}, parent="l/root@1")
        two = save(backend, "l/two@1", {"t": content(2, 100)}, parent="l/root")
        assert (one.parent, one.parent_name) == (root.id, "l/root")
        assert {record.id for record in backend.children(root.id)} == {one.id, two.id}
        assert backend.children(two.id) == []
        backend.remove(parse("l/root@1"))
        found = backend.by_id(root.id, "l/root")
        assert found.removed is not None
        assert str(found.reference) == "l/root@1"
        assert {record.id for record in backend.children(root.id)} == {one.id, two.id}
        with expect(ModelNotFound, "a number of another model"):
            backend.by_id(root.id, "l/one")
        again = save(backend, "l/root@1", {"t": content(3, 100)})
        assert again.id != root.id
        assert backend.by_id(again.id, "l/root").removed is None
        backend.remove(parse("l/one@1"))
        removed = {record.id: record.removed for record in backend.children(root.id)}
        assert removed[two.id] is None
        assert removed[one.id] is not None


def check_kin(opener: Opener) -> None:
    """The versions with most bytes in common layers come first; of equals, the best by a metric."""
    a, b, c, d = (bytes([n]) * 16 for n in range(4))
    with opened(opener) as backend:
        assert list(backend.kin([a, b], "*", 5, None, False)) == []
        save(backend, "k/one@1", {"t": b"1"}, layers={a: 100}, metrics={"acc": 0.9})
        save(backend, "k/two@1", {"t": b"2"}, layers={a: 100, b: 10}, metrics={"acc": 0.1})
        save(backend, "k/low@1", {"t": b"3"}, layers={a: 100}, metrics={"acc": 0.5})
        save(backend, "k/bare@1", {"t": b"4"}, layers={a: 100}, configs={b"key": b"config"})
        save(backend, "other@1", {"t": b"5"}, layers={a: 10**6, d: 1})
        save(backend, "no/layers@1", {"t": b"6"})

        def names(*layers: bytes, by: str | None = None, lower: bool = False) -> list[str]:
            return [kin.record.name for kin in backend.kin(layers, "k/*", 3, by, lower)]

        assert names(a, b, c) == ["k/two", "k/bare", "k/low"], "most bytes, then the newest"
        assert names(a, by="acc") == ["k/one", "k/low", "k/two"]
        assert names(a, by="acc", lower=True) == ["k/two", "k/low", "k/one"]
        assert names(c) == []
        (best,) = backend.kin([a, d], "*", 1, None, False)
        assert (best.record.name, best.layers, best.nbytes) == ("other", 2, 10**6 + 1)
        backend.remove(parse("k/two@1"))
        assert names(a, b, c) == ["k/bare", "k/low", "k/one"]
        backend.manifest(parse("k/bare@1"))
        assert backend.configs([b"key", b"key"]) == [b"config", b"config"]
        with expect(Damaged, "a configuration that there never was"):
            backend.configs([b"none"])
