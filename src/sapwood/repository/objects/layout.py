"""Keys and framing of a repository that consists of objects alone.

    repository                      says what this is
    log/nt3@run7/0000000012         what happened to the model nt3/run7, one object per event
    heads/f7/01a1…                  one version: its manifest, and where its tensors lie
    layers/f7/01a1…                 the sizes of its layers, by which ancestors are found
    packs/f7/01a1…                  the new tensors of one save
    moved/01a1…                     where the tensors of a pack are now that gc has moved
    leases/…                        packs that a save is about to share; gc leaves them
    condemned/01a1…/…               packs that a running gc is about to remove; no save shares them
    gc/…                            the gc runs under way

Everything but ``moved`` is written once and never replaced, so that what a reader has seen of it
stays right, and the keeper's conditional put decides every race.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import struct
import time
from typing import Any

from sapwood.errors import Damaged

__all__ = [
    "CONDEMNED",
    "FORMAT",
    "GC",
    "HEADS",
    "LARGEST",
    "LAYERS",
    "LEASES",
    "LOG",
    "MARKER",
    "MOVED",
    "condemned_key",
    "frame",
    "framed_json",
    "log_folder",
    "log_key",
    "moved_key",
    "name_of_folder",
    "new_token",
    "parse_json",
    "sharded",
    "unframe",
]

MARKER = "repository"
FORMAT = 1
LOG, HEADS, LAYERS, MOVED = "log", "heads", "layers", "moved"
LEASES, CONDEMNED, GC = "leases", "condemned", "gc"
LARGEST = 2**30
"""The most bytes of a head that are taken into memory."""

_MAGIC = b"SWOBJ1"
_HEAD = struct.Struct("<6s2sQ")  # magic, kind, bytes of the body
_SUM = 16


def log_folder(name: str) -> str:
    """Where a model's log is: one folder, whatever parts its name has ('@' is in no name)."""
    return f"{LOG}/{name.replace('/', '@')}"


def name_of_folder(part: str) -> str:
    """The reverse, for the last part of such a folder."""
    return part.replace("@", "/")


def log_key(name: str, number: int) -> str:
    """The key of an event."""
    return f"{log_folder(name)}/{number:010d}"


def moved_key(pack: str) -> str:
    """Where it says where a pack's tensors are now."""
    return f"{MOVED}/{_last(pack)}"


def condemned_key(pack: str, token: str) -> str:
    """The sign of one gc run that it is about to remove a pack."""
    return f"{CONDEMNED}/{_last(pack)}/{token}"


def new_token() -> str:
    """A name that nobody else takes; sorted by time."""
    return f"{time.time_ns() // 1_000_000:012x}-{secrets.token_hex(6)}"


def sharded(folder: str, token: str) -> str:
    """A key below a folder, spread over 256 of them."""
    return f"{folder}/{token[-2:]}/{token}"


def frame(kind: bytes, body: bytes) -> bytes:
    """A body with what is needed to see that it came back as it was written."""
    head = _HEAD.pack(_MAGIC, kind, len(body)) + body
    return head + hashlib.blake2b(head, digest_size=_SUM).digest()


def unframe(kind: bytes, content: bytes, key: str) -> memoryview:
    """The body.

    Raises:
        Damaged: it is not what was written, or something else; names the key.
    """
    data = memoryview(content)
    if len(data) < _HEAD.size + _SUM:
        raise Damaged(f"{key} has {len(data)} bytes: it is truncated")
    magic, found, nbytes = _HEAD.unpack_from(data)
    if magic != _MAGIC or found != kind:
        raise Damaged(f"{key} is not what its name says, or of a newer version of Sapwood")
    if _HEAD.size + nbytes + _SUM != len(data):
        raise Damaged(f"{key} is truncated: {len(data)} bytes of {_HEAD.size + nbytes + _SUM}")
    if hashlib.blake2b(data[:-_SUM], digest_size=_SUM).digest() != data[-_SUM:]:
        raise Damaged(f"{key} is damaged: its own checksum does not match")
    return data[_HEAD.size : -_SUM]


def framed_json(kind: bytes, value: Any) -> bytes:
    """A small object."""
    return frame(kind, json.dumps(value, separators=(",", ":")).encode("utf-8", "surrogatepass"))


def parse_json(kind: bytes, content: bytes, key: str) -> dict[str, Any]:
    """The reverse.

    Raises:
        Damaged: see ``unframe``.
    """
    body = unframe(kind, content, key)
    try:
        found = json.loads(bytes(body).decode("utf-8", "surrogatepass"))
    except (ValueError, RecursionError) as error:
        raise Damaged(f"{key} is damaged: {error}") from error
    if not isinstance(found, dict):
        raise Damaged(f"{key} is damaged: no table")
    return found


def _last(key: str) -> str:
    return key.rpartition("/")[2]
