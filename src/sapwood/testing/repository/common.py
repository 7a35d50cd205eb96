"""What the checks of a back end have in common."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from sapwood.repository.base import (
    NOTHING,
    Backend,
    BlobPart,
    Mappable,
    ModelRecord,
    NewModel,
    fresh,
)
from sapwood.repository.manifest import Manifest
from sapwood.repository.names import parse
from sapwood.storage import Durability
from sapwood.testing.storage.common import content, expect

__all__ = [
    "Harm",
    "Opener",
    "content",
    "expect",
    "gc",
    "harm_packs",
    "new_model",
    "opened",
    "problems_of",
    "read_all",
    "references",
    "save",
]

Opener = Callable[[], Backend]
"""Opens the place that is checked; each time the same one, also in another process if it is shared
between processes."""
Harm = Callable[[Backend, Callable[[bytes], bytes]], None]
"""Puts what a function makes of them in place of all stored runs of tensors' bytes."""


@contextmanager
def opened(opener: Opener) -> Iterator[Backend]:
    """A back end, closed at the end."""
    backend = opener()
    try:
        yield backend
    finally:
        backend.close()


def new_model(reference: str, tensors: Mapping[str, bytes], **more: Any) -> NewModel:
    """A version of which every tensor is new; names with the same bytes object are tied."""
    target = parse(reference)
    parts = list({id(data): data for data in tensors.values()}.values())
    number = {id(data): n for n, data in enumerate(parts)}
    manifest = Manifest(
        dtypes=("uint8",) * len(parts),
        shapes=tuple((len(data),) for data in parts),
        blobs=tuple(fresh(n) if data else NOTHING for n, data in enumerate(parts)),
        names=tuple((name, number[id(data)]) for name, data in tensors.items()),
        structure={"of": reference},
        graph=b"graph of " + reference.encode(),
    )
    return NewModel(name=target.name, version=target.version, manifest=manifest, **more)


def save(
    backend: Backend,
    reference: str,
    tensors: Mapping[str, bytes],
    *,
    parent: str | None = None,
    durability: Durability = Durability.MEMORY,
    **more: Any,
) -> ModelRecord:
    """Save some bytes, as a repository does: tensors of a parent may be alike."""
    alike: dict[int, int] = {}
    model = new_model(reference, tensors, **more)
    if parent is not None:
        record, origin = backend.manifest(parse(parent))
        more |= {"parent": record.id, "parent_name": record.name}
        model = new_model(reference, tensors, **more)
        for name, number in model.manifest.names:
            other = origin.by_name.get(name)
            if other is not None and origin.sizes[other] == model.manifest.sizes[number]:
                alike[number] = origin.blobs[other]
    parts = list({id(data): data for data in tensors.values()}.values())
    alike = {n: blob for n, blob in alike.items() if blob != NOTHING}
    return backend.save(model, [memoryview(data) for data in parts], alike, durability)


def read_all(backend: Backend, reference: str) -> dict[str, bytes]:
    """Every tensor of a version, as reading gives it, and as mapping does where there is any."""
    _, manifest = backend.manifest(parse(reference))
    out = [bytearray(nbytes) for nbytes in manifest.sizes]
    backend.read(
        [
            BlobPart(blob, 0, memoryview(data))
            for blob, data in zip(manifest.blobs, out, strict=True)
            if blob != NOTHING
        ]
    )
    if isinstance(backend, Mappable):
        blobs = [blob for blob in manifest.blobs if blob != NOTHING]
        for blob, memory in (backend.mapped(blobs) or {}).items():
            assert memory == out[manifest.blobs.index(blob)], "mapped bytes are not those read"
    return {name: bytes(out[number]) for name, number in manifest.names}


def references(backend: Backend, pattern: str = "*") -> list[str]:
    """The versions there are."""
    return [str(record.reference) for record in backend.models(pattern)]


def problems_of(backend: Backend) -> list[str]:
    """What ``verify`` finds, all hashed."""
    backend.flush()
    return backend.verify(said=_ignore).problems


def gc(backend: Backend, *, quiet: float = 0.0) -> Any:
    """Everything that can go goes."""
    return backend.gc(quiet=quiet, said=_ignore)


def harm_packs(backend: Backend, change: Callable[[bytes], bytes]) -> None:
    """For back ends whose attribute ``keeper`` has packs."""
    keeper: Any = backend.keeper  # type: ignore[attr-defined]
    for entry in list(keeper.list("packs")):
        data = keeper.get(entry.key, limit=2**30)
        keeper.put(entry.key, [change(data)], replace=True)


def _ignore(_: str) -> None:
    """Nobody wants to know."""
