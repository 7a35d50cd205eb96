"""Checksums as a message: as many bytes as both sides expect."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sapwood.tiers.digest import digest

__all__ = ["pack_digests", "size_of_digests", "unpack_digests"]


def size_of_digests(count: int, algorithm: str) -> int:
    """Bytes that ``count`` checksums need."""
    return count * _size(algorithm)


def pack_digests(digests: Sequence[str]) -> Tensor:
    """Checksums in a row."""
    return torch.tensor(list(bytes.fromhex("".join(digests))), dtype=torch.uint8)


def unpack_digests(data: Tensor, algorithm: str) -> list[str]:
    """The reverse of ``pack_digests``."""
    text, each = bytes(data.cpu().numpy()).hex(), 2 * _size(algorithm)
    return [text[at : at + each] for at in range(0, len(text), each)]


def _size(algorithm: str) -> int:
    return len(digest(b"", algorithm)) // 2
