"""Which tensor of a version is what: the model's have names, and all others are found here.

Beside the model a version keeps the optimizer's tensors, what was saved beside tensors, and every
rank's record, so that a restore from it is complete. These have no names in the manifest: whoever
loads the version gets the model alone.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sapwood.errors import CheckpointError, SapwoodError
from sapwood.repository.base import NOTHING, Backend, BlobPart, ModelRecord
from sapwood.repository.manifest import Manifest, TensorRow
from sapwood.repository.names import Reference
from sapwood.tiers.digest import seal_json, unseal
from sapwood.tiers.record import ShardRecord
from sapwood.tiers.versions.facts import Facts

__all__ = ["Index", "Key", "Version", "open_version", "read_blob", "read_whole"]

Key = tuple[str, str]
_FORMAT = "sapwood-version/1"


@dataclass(frozen=True)
class Index:
    """Numbers of tensors in a version's manifest."""

    tensors: Mapping[Key, int]
    """By file and name, as in the checkpoint's catalog."""
    records: tuple[int, ...]
    """The record of each rank."""
    extras: Mapping[int, int]
    """By rank: the bytes its extras refer to, where there are some."""

    def encode(self) -> bytes:
        """As bytes, with a checksum of them."""
        body = {
            "format": _FORMAT,
            "tensors": [[file, name, number] for (file, name), number in self.tensors.items()],
            "records": self.records,
            "extras": list(self.extras.items()),
        }
        return seal_json(json.dumps(body, separators=(",", ":")).encode())

    @classmethod
    def decode(cls, content: bytes, what: str, tensors: int) -> Index:
        """The reverse; ``tensors`` is how many the manifest has.

        Raises:
            CheckpointError: it is damaged, or does not belong to the manifest.
        """
        body = unseal(content, what)
        try:
            found = _decoded(json.loads(body))
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"{what} is no index of a checkpoint: {error!r}") from error
        numbers = (*found.tensors.values(), *found.records, *found.extras.values())
        if not found.records or min(numbers) < 0 or max(numbers) >= tensors:
            raise CheckpointError(f"{what} does not belong to its manifest of {tensors} tensors")
        return found


def _decoded(body: Mapping[str, Any]) -> Index:
    if body["format"] != _FORMAT:
        raise ValueError(f"its format is {body['format']!r}, expected {_FORMAT!r}")
    return Index(
        {(str(file), str(name)): int(number) for file, name, number in body["tensors"]},
        tuple(int(number) for number in body["records"]),
        {int(rank): int(number) for rank, number in body["extras"]},
    )


@dataclass(frozen=True)
class Version:
    """A checkpoint that is a version, opened."""

    backend: Backend
    record: ModelRecord
    facts: Facts
    manifest: Manifest
    index: Index

    def row(self, key: Key) -> TensorRow | None:
        """A tensor, by file and name; None if the checkpoint has none of that name."""
        number = self.index.tensors.get(key)
        return None if number is None else self.manifest.row(number)

    def content(self, rank: int) -> bytes:
        """A rank's record as it was put.

        Raises:
            CheckpointError: there is none, or it cannot be read.
        """
        if not 0 <= rank < len(self.index.records):
            raise CheckpointError(
                f"{self.record.reference} has no shard {rank}, but {len(self.index.records)}"
            )
        return read_whole(self.backend, self.manifest.row(self.index.records[rank]))

    def shard_record(self, rank: int) -> ShardRecord:
        """The same, decoded."""
        what = f"the record of rank {rank} in {self.record.reference}"
        return ShardRecord.decode(self.content(rank), what)


def open_version(backend: Backend, reference: Reference) -> Version:
    """Open a version that is a checkpoint.

    Raises:
        StoreError, StorageError: it is not there, or cannot be read.
        CheckpointError: it is no checkpoint, or its index is damaged.
    """
    record, manifest = backend.manifest(reference)
    facts, what = Facts.of(record), f"the index of {record.reference}"
    if facts is None or not 0 <= facts.index < len(manifest.dtypes):
        raise CheckpointError(f"{record.reference} is no checkpoint")
    content = read_whole(backend, manifest.row(facts.index))
    index = Index.decode(content, what, len(manifest.dtypes))
    if len(index.records) != facts.world:
        raise CheckpointError(f"{what} is of {len(index.records)} ranks, not of {facts.world}")
    return Version(backend, record, facts, manifest, index)


def read_whole(backend: Backend, row: TensorRow) -> bytes:
    """All bytes of a tensor.

    Raises:
        CheckpointError: they cannot be read.
    """
    out = bytearray(row.nbytes)
    read_blob(backend, row.blob, 0, out)
    return bytes(out)


def read_blob(backend: Backend, blob: int, start: int, out: Any) -> None:
    """Fill a buffer from a blob.

    Raises:
        CheckpointError: it cannot be read.
    """
    memory = memoryview(out).cast("B")
    if not len(memory):
        return
    if blob == NOTHING:
        raise CheckpointError(f"{len(memory)} bytes are wanted of a tensor that has none")
    try:
        backend.read([BlobPart(blob, start, memory)])
    except SapwoodError as error:
        raise CheckpointError(f"cannot read from {backend.name}: {error}") from error
