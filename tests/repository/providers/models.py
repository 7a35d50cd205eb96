"""Small models as providers are given them."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

from sapwood.repository.base import NOTHING, ModelRecord, NewModel
from sapwood.repository.manifest import Manifest
from sapwood.repository.merging import digest_of
from sapwood.repository.names import Reference
from sapwood.repository.providers.base import Head, NewPart, PartRange, Provider, VersionKey
from sapwood.repository.providers.placement import key_of
from sapwood.storage import Durability


def tensor(seed: object, nbytes: int) -> bytes:
    return hashlib.shake_128(str(seed).encode()).digest(nbytes)


def quiet(_: str) -> None:
    pass


def put(
    provider: Provider,
    version: VersionKey,
    tensors: Sequence[bytes],
    durability: Durability = Durability.MEMORY,
    same_as: dict[int, tuple[VersionKey, bytes]] | None = None,
) -> list[int]:
    """Put tensors of a version; those of ``same_as`` are not sent."""
    same_as = same_as or {}
    keys = tuple(map(key_of, tensors))
    sources = [None if i in same_as else memoryview(t) for i, t in enumerate(tensors)]
    part = NewPart(version=version, keys=keys, same_as=same_as)
    return provider.put_part(part, sources, durability)


def head_of(version: VersionKey, tensors: Sequence[bytes], **more: Any) -> Head:
    count = len(tensors)
    manifest = Manifest(
        ("uint8",) * count,
        tuple((len(t),) for t in tensors),
        (NOTHING,) * count,
        tuple((f"layer.{i}", i) for i in range(count)),
        {"kind": "dict"},
        b"graph",
    )
    model = NewModel(
        name=version.name, version=version.version, id=version.id, manifest=manifest, **more
    )
    return Head(model=model, keys=tuple(map(key_of, tensors)))


def save(
    provider: Provider, name: str, version: str | None, tensors: Sequence[bytes], **more: Any
) -> ModelRecord:
    """A whole version at one provider."""
    key = provider.reserve(name, version)
    distinct = list(dict.fromkeys(t for t in tensors if t))
    assert put(provider, key, distinct) == []
    return provider.put_head(head_of(key, tensors, **more), synced=False)


def version_of(record: ModelRecord) -> VersionKey:
    return VersionKey(record.name, record.version, record.id)


def read(provider: Provider, version: VersionKey, keys: Sequence[bytes]) -> list[bytes]:
    """Whole tensors."""
    outs = [bytearray(int.from_bytes(key[:8], "little")) for key in keys]
    ranges = [PartRange(key, 0, memoryview(out)) for key, out in zip(keys, outs, strict=True)]
    assert provider.read_part(version, ranges) == []
    return [bytes(out) for out in outs]


def load(provider: Provider, reference: str) -> list[bytes]:
    """All tensors of a version, as a client gets them."""
    name, _, version = reference.partition("@")
    record, manifest, keys = provider.head(Reference(name, version or None))
    assert manifest.graph == b"graph"
    distinct = list(dict.fromkeys(key for key in keys if key))
    found = dict(zip(distinct, read(provider, version_of(record), distinct), strict=True))
    return [found[key] if key else b"" for key in keys]


def proof(version: VersionKey, data: bytes) -> tuple[VersionKey, bytes]:
    return version, digest_of(data)
