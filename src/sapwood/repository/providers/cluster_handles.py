"""Numbers of tensors in a cluster: each knows which tensor of which version it is.

A provider finds a tensor by its version and key, where a back end's blobs are plain numbers. A
handle is such a number that carries both, and lives as long as the manifest it is in: there is no
table that would have to forget some.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from sapwood.errors import Damaged, Gone
from sapwood.repository.base import NOTHING
from sapwood.repository.manifest import Manifest
from sapwood.repository.providers.base import VersionKey
from sapwood.repository.providers.placement import KEY_BYTES

__all__ = ["TensorHandle", "handle_of", "size_of", "with_handles"]

_INDEX_BITS = 32


class TensorHandle(int):
    """A blob number; unique in the cluster."""

    version: VersionKey
    key: bytes

    def __new__(cls, version: VersionKey, index: int, key: bytes) -> TensorHandle:
        """The ``index``-th tensor of a version."""
        made = super().__new__(cls, version.id << _INDEX_BITS | index)
        made.version, made.key = version, key
        return made


def handle_of(blob: int) -> TensorHandle:
    """What a number stands for.

    Raises:
        Gone: it is no number of a manifest that a cluster gave.
    """
    if not isinstance(blob, TensorHandle):
        raise Gone(f"blob {blob} belongs to no manifest of this repository; look it up again")
    return blob


def size_of(key: bytes) -> int:
    """Bytes of the tensor that a key belongs to."""
    return int.from_bytes(key[:8], "little")


def with_handles(version: VersionKey, manifest: Manifest, keys: Sequence[bytes]) -> Manifest:
    """A manifest whose blobs are handles.

    Raises:
        Damaged: the keys are not those of its tensors.
    """
    sizes = manifest.sizes
    if len(keys) != len(sizes):
        raise Damaged(
            f"{version.name}@{version.version} has {len(sizes)} tensors and {len(keys)} keys"
        )
    blobs: list[int] = []
    for index, (key, nbytes) in enumerate(zip(keys, sizes, strict=True)):
        if not key and not nbytes:
            blobs.append(NOTHING)
        elif len(key) == KEY_BYTES and size_of(key) == nbytes:
            blobs.append(TensorHandle(version, index, key))
        else:
            raise Damaged(
                f"{version.name}@{version.version}: the key of tensor {index} is not one of "
                f"{nbytes} bytes"
            )
    return replace(manifest, blobs=tuple(blobs))
