"""What a save holds, as JSON with a checksum of itself: DCP's metadata, without its pickle."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from sapwood.errors import CheckpointError
from sapwood.state.plain import from_plain, to_plain
from sapwood.tiers.digest import DEFAULT_ALGORITHM, seal_json, unseal
from sapwood.tiers.record import RANGE_BYTES

__all__ = ["Item", "Manifest", "cuts"]

FORMAT = "sapwood-dcp/1"


@dataclass(frozen=True, kw_only=True)
class Item:
    """The bytes of one chunk of a tensor, or of one plain value."""

    index: MetadataIndex
    file: str
    start: int
    nbytes: int
    digests: tuple[str, ...]
    """One for every ``RANGE_BYTES``."""
    dtype: str | None = None
    """None for a plain value."""
    shape: tuple[int, ...] = ()

    def torch_dtype(self) -> torch.dtype:
        """The dtype of the chunk."""
        assert self.dtype is not None
        return _dtype(self.dtype)


def cuts(nbytes: int) -> Iterator[tuple[int, int]]:
    """The ranges that have a checksum each."""
    for start in range(0, nbytes, RANGE_BYTES):
        yield start, min(start + RANGE_BYTES, nbytes)


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """All there is to know about one save."""

    metadata: Metadata
    """Its ``storage_data`` is left to the reader."""
    items: tuple[Item, ...]
    files: Mapping[str, int]
    """Size of each file."""
    algorithm: str = DEFAULT_ALGORITHM

    def encode(self) -> bytes:
        """As a file's content.

        Raises:
            CheckpointError: the planner keeps something that is not plain.
        """
        body = json.dumps(
            {
                "format": FORMAT,
                "algorithm": self.algorithm,
                "range_bytes": RANGE_BYTES,
                "state": {k: _plain(v) for k, v in self.metadata.state_dict_metadata.items()},
                "planner": to_plain(self.metadata.planner_data, "the planner's data"),
                "version": self.metadata.version,
                "storage": _plain_meta(self.metadata.storage_meta),
                "files": dict(self.files),
                "items": [_row(item) for item in self.items],
            },
            separators=(",", ":"),
        ).encode()
        return seal_json(body, self.algorithm)

    @classmethod
    def decode(cls, content: bytes, what: str) -> Manifest:
        """The reverse of ``encode``; ``what`` names it in errors.

        Raises:
            CheckpointError: it is truncated, was changed, or is no manifest.
        """
        body = unseal(content, what)
        try:
            return _decoded(json.loads(body))
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise CheckpointError(f"{what} is not a manifest: {error!r}") from error


def _plain(entry: Any) -> Any:
    if isinstance(entry, BytesStorageMetadata):
        return None
    properties = entry.properties
    return {
        "dtype": _name(properties.dtype),
        "requires_grad": properties.requires_grad,
        "size": list(entry.size),
        "chunks": [[list(c.offsets), list(c.sizes)] for c in entry.chunks],
    }


def _entry(plain: Any) -> TensorStorageMetadata | BytesStorageMetadata:
    if plain is None:
        return BytesStorageMetadata()
    return TensorStorageMetadata(
        properties=TensorProperties(
            dtype=_dtype(plain["dtype"]), requires_grad=bool(plain["requires_grad"])
        ),
        size=torch.Size(plain["size"]),
        chunks=[
            ChunkStorageMetadata(offsets=torch.Size(offsets), sizes=torch.Size(sizes))
            for offsets, sizes in plain["chunks"]
        ],
    )


def _plain_meta(meta: StorageMeta | None) -> Any:
    """Not the id of a load: every reader draws its own."""
    if meta is None:
        return None
    place = None if meta.checkpoint_id is None else str(meta.checkpoint_id)
    return {"checkpoint_id": place, "save_id": meta.save_id, "modules": list(meta.modules)}


def _meta(plain: Any) -> StorageMeta | None:
    if plain is None:
        return None
    return StorageMeta(
        checkpoint_id=plain["checkpoint_id"],
        save_id=plain["save_id"],
        modules=[str(name) for name in plain["modules"]],
    )


def _row(item: Item) -> list[Any]:
    offset = None if item.index.offset is None else list(item.index.offset)
    where = [item.index.fqn, offset, item.index.index]
    return [*where, item.file, item.start, item.nbytes, item.digests, item.dtype, item.shape]


def _item(row: Sequence[Any], files: Mapping[str, int]) -> Item:
    fqn, offset, hint, file, start, nbytes, digests, dtype, shape = row
    if not 0 <= start <= start + nbytes <= files[file]:
        raise ValueError(f"{fqn} lies outside {file}")
    if len(digests) != len(list(cuts(nbytes))):
        raise ValueError(f"{fqn} has {len(digests)} checksums")
    return Item(
        index=MetadataIndex(fqn, offset, hint),
        file=file,
        start=start,
        nbytes=nbytes,
        digests=tuple(digests),
        dtype=dtype,
        shape=tuple(shape),
    )


def _decoded(body: Mapping[str, Any]) -> Manifest:
    if body["format"] != FORMAT or body["range_bytes"] != RANGE_BYTES:
        raise ValueError(f"its format is {body['format']!r}, expected {FORMAT!r}")
    files = {str(name): int(size) for name, size in body["files"].items()}
    if any("/" in name for name in files):
        raise ValueError("a file lies outside the save")
    state = {name: _entry(plain) for name, plain in body["state"].items()}
    return Manifest(
        metadata=Metadata(
            state_dict_metadata=state,
            planner_data=from_plain(body["planner"]),
            storage_meta=_meta(body.get("storage")),  # saves of earlier versions have none
            version=body.get("version"),
        ),
        items=tuple(_item(row, files) for row in body["items"]),
        files=files,
        algorithm=body["algorithm"],
    )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name!r} is no dtype")
    return dtype
