"""The tensors of a version to be: those that are there already, and those that are new.

A tensor that several ranks hold parts of is put together in memory. So that this is never much,
what was put together is saved now and then as a hidden version of its own; the one that everybody
sees then refers to it, and the hidden ones go.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

from sapwood.buffers.fresh import fresh_memory
from sapwood.errors import CheckpointError, SapwoodError
from sapwood.repository.base import NOTHING, Backend, BlobPart, ModelRecord, NewModel, fresh
from sapwood.repository.manifest import Manifest
from sapwood.repository.names import Reference
from sapwood.storage import Durability
from sapwood.tiers.versions.parts import PartSource

__all__ = ["VersionDraft"]

GATHERED = 256 * 2**20
"""Bytes that are put together in memory before they are saved."""


class VersionDraft:
    """For one thread. Leave its ``with`` block to have its hidden versions removed."""

    def __init__(self, backend: Backend, home: str, durability: Durability) -> None:
        """``home`` is the name that its hidden versions get."""
        self._backend, self._home, self._durability = backend, home, durability
        self._token = secrets.token_hex(4)
        self._parts: list[Reference] = []
        self._dtypes: list[str] = []
        self._shapes: list[tuple[int, ...]] = []
        self._blobs: list[int] = []
        self._new: dict[int, memoryview] = {}
        self._alike: dict[int, int] = {}
        self._reads: list[BlobPart] = []
        self._gathered = 0

    def add(
        self, dtype: str, shape: Sequence[int], parts: Sequence[PartSource], alike: int = NOTHING
    ) -> int:
        """Add a tensor; its number. ``alike`` is a blob that may hold the same bytes."""
        number = len(self._blobs)
        self._dtypes.append(dtype)
        self._shapes.append(tuple(shape))
        self._blobs.append(_shared(parts))
        if self._blobs[number] != NOTHING or not parts:
            return number
        if len(parts) == 1 and parts[0].data is not None:
            self._new[number] = parts[0].data
            if alike != NOTHING:
                self._alike[number] = alike
            return number
        nbytes = sum(part.nbytes for part in parts)
        if self._gathered and self._gathered + nbytes > GATHERED:
            self._save_gathered()
        self._new[number] = self._gather(parts, nbytes)
        return number

    def add_bytes(self, content: bytes) -> int:
        """Add bytes as a tensor; its number."""
        data = memoryview(content)
        return self.add("uint8", (len(data),), [PartSource(start=0, nbytes=len(data), data=data)])

    def _gather(self, parts: Sequence[PartSource], nbytes: int) -> memoryview:
        """Memory of a tensor; what is not there yet is read when it is saved."""
        memory = fresh_memory(nbytes).data.cast("B")
        at = 0
        for part in parts:
            out = memory[at : at + part.nbytes]
            if part.data is not None:
                out[:] = part.data
            else:
                self._reads.append(BlobPart(part.blob, part.offset, out))
            at += part.nbytes
        self._gathered += nbytes
        return memory

    def _read(self) -> None:
        try:
            self._backend.read(self._reads)
        except SapwoodError as error:
            raise CheckpointError(f"shards in {self._backend.name} are gone: {error}") from error
        self._reads.clear()

    def _save_gathered(self) -> None:
        """Save what is in memory, and go on with the blobs it became."""
        self._read()
        numbers = list(self._new)
        manifest = Manifest(
            ("uint8",) * len(numbers),
            tuple((len(self._new[number]),) for number in numbers),
            tuple(fresh(place) for place in range(len(numbers))),
            (),
            None,
        )
        reference = Reference(self._home, f"part-{self._token}-{len(self._parts)}")
        model = NewModel(name=reference.name, version=reference.version, manifest=manifest)
        self._parts.append(reference)
        self._backend.save(model, [self._new[number] for number in numbers], {}, self._durability)
        _, saved = self._backend.manifest(reference)
        for number, blob in zip(numbers, saved.blobs, strict=True):
            self._blobs[number] = blob
        self._new.clear()
        self._alike.clear()
        self._gathered = 0

    def save(
        self, model: NewModel, names: tuple[tuple[str, int], ...], structure: object
    ) -> ModelRecord:
        """Make the version be there; may be called again with another name.

        Raises:
            ModelExists: it is.
        """
        self._read()
        blobs = list(self._blobs)
        for place, number in enumerate(self._new):
            blobs[number] = fresh(place)
        manifest = Manifest(
            tuple(self._dtypes), tuple(self._shapes), tuple(blobs), names, structure
        )
        places: Mapping[int, int] = {number: place for place, number in enumerate(self._new)}
        alike = {places[number]: blob for number, blob in self._alike.items()}
        sources = list(self._new.values())
        return self._backend.save(
            replace(model, manifest=manifest), sources, alike, self._durability
        )

    def __enter__(self) -> VersionDraft:
        """Nothing is saved yet."""
        return self

    def __exit__(self, *_: object) -> None:
        """Remove what was saved on the way: the version refers to it, or there will be none."""
        for reference in self._parts:
            with suppress(SapwoodError):
                self._backend.remove(reference)


def _shared(parts: Sequence[PartSource]) -> int:
    """The blob of an earlier tensor all of whose bytes are unchanged, else ``NOTHING``."""
    blobs = {part.blob for part in parts if part.shared}
    whole = len(blobs) == 1 and all(part.shared for part in parts)
    return blobs.pop() if whole else NOTHING
