"""Checksums: xxh3 where the xxhash package is installed, else blake2b.

Small files that describe others carry a checksum of themselves, so that a flipped bit in them is
noticed as surely as one in the data. JSON objects have it as their last member (``seal_json``),
which leaves them JSON for other tools, anything else in a line behind it (``seal``). Records and
manifests of earlier versions have that line too, and are still read.
"""

from __future__ import annotations

import hashlib
import re
import zlib
from collections.abc import Callable, Iterable
from typing import Any

from sapwood.errors import CheckpointError

__all__ = [
    "DEFAULT_ALGORITHM",
    "FAST_ALGORITHM",
    "digest",
    "digest_of_row",
    "fast_digest",
    "matches",
    "seal",
    "seal_json",
    "unseal",
]


_ALGORITHMS: dict[str, Callable[[], Any]] = {"blake2b": lambda: hashlib.blake2b(digest_size=8)}
try:
    import xxhash
except ModuleNotFoundError:
    pass
else:
    _ALGORITHMS["xxh3"] = lambda: xxhash.xxh3_64()

_MARK = rb'"([a-z0-9]+):([0-9a-f]+)"'
# Exactly as ``seal_json`` writes it, on one line or indented: whatever else is there was changed.
_INSIDE = (
    re.compile(rb',"checksum":' + _MARK + rb"\}\Z"),
    re.compile(rb',\n "checksum": ' + _MARK + rb"\n\}\Z"),
)
_TAIL = 256
"""More than a checksum and what is around it takes."""

DEFAULT_ALGORITHM = "xxh3" if "xxh3" in _ALGORITHMS else "blake2b"
FAST_ALGORITHM = "xxh3" if "xxh3" in _ALGORITHMS else "crc32"
"""For what is digested beside a training: blake2b takes sixteen times as long as a copy, crc32 five
times, xxh3 about half."""


def digest(data: Any, algorithm: str = DEFAULT_ALGORITHM) -> str:
    """The checksum of anything with a buffer, as hexadecimal digits.

    Raises:
        CheckpointError: the algorithm is not available here.
    """
    return digest_of_row([data], algorithm)


def digest_of_row(pieces: Iterable[Any], algorithm: str = DEFAULT_ALGORITHM) -> str:
    """The checksum of several pieces in a row, which is that of all of them in one."""
    try:
        found = _ALGORITHMS[algorithm]()
    except KeyError:
        raise CheckpointError(
            f"checksums of this checkpoint are {algorithm!r}, which is not available here; "
            "pip install 'sapwood[checkpoint]'"
        ) from None
    for piece in pieces:
        found.update(piece)
    return str(found.hexdigest())


def fast_digest(data: Any) -> str:
    """A checksum by ``FAST_ALGORITHM``, as hexadecimal digits; never kept on disk."""
    if FAST_ALGORITHM == "crc32":
        return f"{zlib.crc32(data):08x}"
    return digest(data, FAST_ALGORITHM)


def matches(data: Any, expected: str, algorithm: str) -> bool:
    """Whether ``data`` has this checksum."""
    return digest(data, algorithm) == expected


def seal(body: bytes, algorithm: str = DEFAULT_ALGORITHM) -> bytes:
    """``body`` with its checksum in a line after it."""
    return body + f"\n{algorithm}:{digest(body, algorithm)}".encode()


def seal_json(body: bytes, algorithm: str = DEFAULT_ALGORITHM) -> bytes:
    """A JSON object with one more member, ``checksum``, of all that stands before it.

    The object may be on one line, or indented by one.
    """
    head = body.removesuffix(b"}")
    assert len(head) == len(body) - 1, "not a JSON object"
    plain = head.removesuffix(b"\n")
    mark = f'"{algorithm}:{digest(plain, algorithm)}"'
    tail = f',"checksum":{mark}}}' if plain == head else f',\n "checksum": {mark}\n}}'
    return plain + tail.encode()


def unseal(content: bytes, what: str) -> bytes:
    """The reverse of ``seal`` and of ``seal_json``; ``what`` names the content in errors.

    Raises:
        CheckpointError: it is truncated or was changed.
    """
    for pattern in _INSIDE:
        found = pattern.search(content, max(0, len(content) - _TAIL))
        if found is not None:
            head = content[: found.start()]
            if matches(head, found[2].decode(), found[1].decode()):
                return head + b"}"
            raise CheckpointError(f"{what} is damaged: its own checksum does not match")
    body, _, tail = content.rpartition(b"\n")
    algorithm, _, mark = tail.decode("ascii", "replace").partition(":")
    if not body or not mark or not matches(body, mark, algorithm):
        raise CheckpointError(f"{what} is damaged: its own checksum does not match")
    return body
