"""Checksums: xxh3 where the xxhash package is installed, else blake2b.

Small files that describe others carry a checksum of themselves in their last line (``seal``), so
that a flipped bit in them is noticed as surely as one in the data.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from typing import Any

from sapwood.errors import CheckpointError

__all__ = ["DEFAULT_ALGORITHM", "digest", "digest_of_row", "matches", "seal", "unseal"]


_ALGORITHMS: dict[str, Callable[[], Any]] = {"blake2b": lambda: hashlib.blake2b(digest_size=8)}
try:
    import xxhash
except ModuleNotFoundError:
    pass
else:
    _ALGORITHMS["xxh3"] = lambda: xxhash.xxh3_64()

DEFAULT_ALGORITHM = "xxh3" if "xxh3" in _ALGORITHMS else "blake2b"


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


def matches(data: Any, expected: str, algorithm: str) -> bool:
    """Whether ``data`` has this checksum."""
    return digest(data, algorithm) == expected


def seal(body: bytes, algorithm: str = DEFAULT_ALGORITHM) -> bytes:
    """``body`` with its checksum in a line after it."""
    return body + f"\n{algorithm}:{digest(body, algorithm)}".encode()


def unseal(content: bytes, what: str) -> bytes:
    """The reverse of ``seal``; ``what`` names the content in errors.

    Raises:
        CheckpointError: it is truncated or was changed.
    """
    body, _, tail = content.rpartition(b"\n")
    algorithm, _, mark = tail.decode("ascii", "replace").partition(":")
    if not body or not mark or not matches(body, mark, algorithm):
        raise CheckpointError(f"{what} is damaged: its own checksum does not match")
    return body
