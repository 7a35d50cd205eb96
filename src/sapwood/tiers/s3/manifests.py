"""The manifest of a checkpoint in a bucket: as in a folder, or as earlier versions wrote it."""

from __future__ import annotations

import json
from contextlib import suppress

from sapwood.errors import CheckpointError
from sapwood.tiers.manifest import FORMAT, MANIFEST, Manifest
from sapwood.tiers.record import CheckpointId

__all__ = ["manifest_name", "read_manifest"]


def manifest_name(id: CheckpointId) -> str:
    """The object of a checkpoint's manifest."""
    return f"{id.folder}/{MANIFEST}"


def read_manifest(content: bytes, what: str) -> Manifest:
    """A manifest of this version, or of those that wrote another one to buckets than to folders.

    Of the latter ``records`` is empty: they told the names of records, and not their checksums.

    Raises:
        CheckpointError: it is neither, or damaged.
    """
    try:
        return Manifest.decode(content, what)
    except CheckpointError:
        with suppress(KeyError, TypeError, ValueError, AttributeError):
            return _earlier(content)
        raise


def _earlier(content: bytes) -> Manifest:
    body = json.loads(content)
    if body["format"] != FORMAT or len(body["shards"]) != body["world"]:
        raise ValueError("it is none")
    return Manifest(
        id=CheckpointId(int(body["step"]), str(body["attempt"])),
        world=int(body["world"]),
        created=0.0,
        files={str(name): int(size) for name, size in body["files"].items()},
        records=(),
    )
