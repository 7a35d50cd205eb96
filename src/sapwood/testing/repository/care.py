"""Checks of gc and verify: room is given back, and damage is found."""

from __future__ import annotations

from sapwood.errors import SapwoodError
from sapwood.repository.base import BlobPart
from sapwood.repository.names import parse
from sapwood.testing.repository.common import (
    Harm,
    Opener,
    content,
    expect,
    gc,
    harm_packs,
    opened,
    problems_of,
    read_all,
    save,
)

__all__ = ["check_damage", "check_gc", "check_shared_bytes", "check_truncated"]


def check_shared_bytes(opener: Opener) -> None:
    """Equal bytes are kept once: a parent's, a stranger's, and those within one version."""
    base = {"a": content(1, 40_000), "b": content(2, 10_000)}
    with opened(opener) as backend:
        save(backend, "s/base@1", base)
        save(backend, "s/child@1", {**base, "b": content(3, 10_000)}, parent="s/base@1")
        save(backend, "s/liar@1", {"a": content(4, 40_000)}, parent="s/base@1")
        save(backend, "s/stranger@1", {"x": bytes(base["a"]), "y": bytes(bytearray(base["a"]))})
        backend.flush()
        assert gc(backend).live == 40_000 + 10_000 + 10_000 + 40_000
        assert read_all(backend, "s/child@1") == {**base, "b": content(3, 10_000)}
        assert read_all(backend, "s/liar@1") == {"a": content(4, 40_000)}
        assert read_all(backend, "s/stranger@1") == {"x": base["a"], "y": base["a"]}
        backend.remove(parse("s/base@1"))
        assert gc(backend).live == 40_000 + 10_000 + 40_000
        assert read_all(backend, "s/child@1") == {**base, "b": content(3, 10_000)}
        again = save(backend, "s/again@1", base)
        assert again.nbytes == 50_000
        assert read_all(backend, "s/again@1") == base
        assert problems_of(backend) == []
    with opened(opener) as backend:
        assert backend.name


def check_gc(opener: Opener) -> None:
    """What was removed is gone, what is left is whole, and the next gc finds nothing to do."""
    with opened(opener) as backend:
        for version in range(6):
            tensors = {"own": content(version, 50_000), "frozen": content(99, 3000)}
            parent = f"g@{version - 1}" if version else None
            save(backend, f"g@{version}", tensors, parent=parent)
        backend.flush()
        before, manifest = backend.manifest(parse("g@0"))
        for version in range(5):
            backend.remove(parse(f"g@{version}"))
        swept = gc(backend)
        assert swept.live == 53_000
        assert swept.packs >= 5
        assert swept.freed >= 5 * 50_000
        assert read_all(backend, "g@5") == {"own": content(5, 50_000), "frozen": content(99, 3000)}
        blob = manifest.blobs[manifest.by_name["own"]]
        with expect(SapwoodError, "reading what was removed"):
            backend.read([BlobPart(blob, 0, memoryview(bytearray(50_000)))])
        assert backend.by_id(before.id, "g").removed is not None
        again = gc(backend)
        assert (again.packs, again.live) == (0, 53_000)
        assert problems_of(backend) == []
        save(backend, "g@6", {"own": content(0, 50_000)}, parent="g@5")
        assert read_all(backend, "g@6") == {"own": content(0, 50_000)}
        backend.remove(parse("g@5"))
        backend.remove(parse("g@6"))
        assert gc(backend).live == 0
        assert gc(backend).packs == 0
        assert problems_of(backend) == []


def check_damage(opener: Opener, harm: Harm = harm_packs) -> None:
    """Bytes that were changed are found by their hash; the tensor is named."""
    with opened(opener) as backend:
        save(backend, "d/model@1", {"layer.weight": content(1, 100_000)})
        assert problems_of(backend) == []
        harm(backend, _flipped)
        problems = problems_of(backend)
        assert len(problems) == 1, f"one tensor was changed: {problems}"
        assert "d/model@1 layer.weight" in problems[0], problems


def check_truncated(opener: Opener, harm: Harm = harm_packs) -> None:
    """Bytes that are missing are found, and reading them never gives others."""
    with opened(opener) as backend:
        save(backend, "d/model@1", {"layer.weight": content(1, 100_000)})
        assert problems_of(backend) == []
        harm(backend, lambda data: data[: len(data) // 2])
        problems = problems_of(backend)
        assert len(problems) == 1, f"one tensor was truncated: {problems}"
        assert "d/model@1 layer.weight" in problems[0], problems
        with expect(SapwoodError, "reading what was truncated"):
            read_all(backend, "d/model@1")


def _flipped(data: bytes) -> bytes:
    changed = bytearray(data)
    changed[len(changed) // 2] ^= 1
    return bytes(changed)
