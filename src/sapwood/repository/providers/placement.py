"""Which providers something belongs to: rendezvous hashing, so that nobody is asked.

Every provider has a score for every key; the providers with the highest scores keep it. When one
is added, only the keys move that it scores highest for; where they were before is next in order.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

from sapwood.errors import ConfigError
from sapwood.repository.merging import mark_of, plain_mark_of
from sapwood.repository.providers.base import Member, Members

__all__ = ["KEY_BYTES", "is_key_of", "key_of", "order", "places"]

KEY_BYTES = 24


def key_of(data: Any) -> bytes:
    """A tensor's key: its size and a fast hash of its bytes; b"" for no bytes.

    It says where a tensor belongs, not that two are equal.
    """
    nbytes = memoryview(data).nbytes
    return nbytes.to_bytes(8, "little") + mark_of(data) if nbytes else b""


def is_key_of(key: bytes, data: Any) -> bool:
    """Whether a key is that of these bytes, whichever of the fast hashes its maker had."""
    return key == key_of(data) or key == _size_of(data) + plain_mark_of(data)


def order(members: Sequence[Member], key: bytes) -> list[Member]:
    """All members, those first that a key belongs to."""
    if not members:
        raise ConfigError("a repository on providers has at least one of them")
    if len(members) == 1:
        return list(members)
    return sorted(members, key=lambda member: _score(member.name, key), reverse=True)


def places(members: Members, key: bytes, name: str) -> list[Member]:
    """The members that keep a tensor of a model, or its head (``key=b""``)."""
    if members.placement == "model":
        # The paper's: modulo the number of providers. It moves nearly everything when one is added.
        ordered = sorted(members.members)
        first = int.from_bytes(_digest(name.encode())) % len(ordered)
        ordered = ordered[first:] + ordered[:first]
    else:
        ordered = order(members.members, key or b"name " + name.encode())
    return ordered[: members.replicas]


def _score(member: str, key: bytes) -> bytes:
    return _digest(member.encode() + b"\0" + key)


def _size_of(data: Any) -> bytes:
    return memoryview(data).nbytes.to_bytes(8, "little")


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=8).digest()
