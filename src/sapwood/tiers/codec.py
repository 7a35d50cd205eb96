"""Erasure codes: k fragments of a block and m more, of which any k give the block back.

Bytes are coded in stripes. ISA-L itself codes faster than memory can be read; what costs is the
memory pyeclib takes for every fragment of every call. Small fragments come from memory that stays
with the process; large ones are mapped, cleared and unmapped each time, four times slower. So a
block of some MiB, which is what is sent and has a checksum, is many stripes.

With one parity fragment it is the exclusive or of the others, for which numpy is enough.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from sapwood.errors import CheckpointError, ConfigError

__all__ = ["BLOCK_BYTES", "Codec", "Scheme", "best_code"]

Bytes = npt.NDArray[np.uint8]

BLOCK_BYTES = 4 * 2**20
"""Data per block: what one checksum per fragment covers, and what is decoded at once."""
PART_BYTES = 64 * 2**10
"""Data per fragment of a stripe."""
_MOST = 32  # what every backend of pyeclib can do
_BACKENDS = ("isa_l_rs_cauchy", "isa_l_rs_vand_inv", "liberasurecode_rs_vand")
"""Fastest first; each can do without any m fragments, which not all of pyeclib's can."""


@dataclass(frozen=True, order=True)
class Scheme:
    """How many fragments: ``k`` of data, ``m`` of parity."""

    k: int
    m: int

    def __post_init__(self) -> None:
        """Refuse what cannot be coded."""
        if self.k < 1 or self.m < 1 or self.total > _MOST:
            raise ConfigError(
                f"parity {self}: expected at least 1+1, and at most {_MOST} fragments in all"
            )

    @property
    def total(self) -> int:
        """All fragments."""
        return self.k + self.m

    @classmethod
    def parse(cls, text: str) -> Scheme:
        """A scheme from ``k+m``."""
        found = re.fullmatch(r"(\d{1,3})\+(\d{1,3})", text)
        if found is None:
            raise ConfigError(f"parity is {text!r}, expected data+parity fragments such as 4+2")
        return cls(int(found[1]), int(found[2]))

    def __str__(self) -> str:
        """As it is written in settings."""
        return f"{self.k}+{self.m}"


class StripeCode(Protocol):
    """A code for stripes of up to ``k * PART_BYTES`` bytes, and at least one."""

    def piece_bytes(self, nbytes: int) -> int:
        """Size of each fragment of a stripe."""
        ...

    def encode(self, stripe: Bytes) -> Sequence[Any]:
        """The fragments, as anything with a buffer."""
        ...

    def decode(self, pieces: Mapping[int, Bytes], nbytes: int) -> Any:
        """The stripe, from any k fragments."""
        ...


class Codec:
    """Codes blocks. May be used by several threads."""

    def __init__(self, scheme: Scheme, code: str = "", *, block: int = BLOCK_BYTES) -> None:
        """``code`` is one of ``best_code``'s; by default the best there is here.

        Raises:
            ConfigError: it is not available here.
        """
        self.scheme = scheme
        self.code = code or best_code(scheme)
        self.stripe = scheme.k * PART_BYTES
        self.block = max(block // self.stripe, 1) * self.stripe
        """Bytes per block: whole stripes."""
        self._code: StripeCode = _Xor(scheme) if self.code == "xor" else _Solomon(scheme, self.code)

    def blocks(self, nbytes: int) -> list[tuple[int, int]]:
        """Where the blocks of so many bytes begin and end."""
        return [(at, min(at + self.block, nbytes)) for at in range(0, nbytes, self.block)]

    @cached_property
    def block_fragment(self) -> int:
        """Size of each fragment of a whole block."""
        return self.fragment_bytes(self.block)

    def fragment_bytes(self, nbytes: int) -> int:
        """Size of each fragment of so many bytes, in whole blocks but for the last."""
        full, rest = divmod(nbytes, self.stripe)
        size = full * self._code.piece_bytes(self.stripe) if full else 0
        return size + (self._code.piece_bytes(rest) if rest else 0)

    def encode(self, block: Bytes, out: Sequence[Bytes]) -> None:
        """Fill one buffer of ``fragment_bytes`` for each fragment of a block."""
        for start, stop, at, size in self._stripes(len(block)):
            pieces = self._code.encode(block[start:stop])
            for buffer, piece in zip(out, pieces, strict=True):
                buffer[at : at + size] = np.frombuffer(piece, np.uint8)

    def decode(self, fragments: Mapping[int, Bytes], out: Bytes) -> None:
        """Fill ``out`` with a block, from any k of its fragments, by their number.

        Raises:
            CheckpointError: these are too few.
        """
        if len(fragments) < self.scheme.k:
            raise CheckpointError(
                f"{len(fragments)} fragments of a {self.scheme} group are too few to rebuild it"
            )
        chosen = sorted(fragments)[: self.scheme.k]
        for start, stop, at, size in self._stripes(len(out)):
            pieces = {number: fragments[number][at : at + size] for number in chosen}
            stripe = self._code.decode(pieces, stop - start)
            out[start:stop] = np.frombuffer(stripe, np.uint8, count=stop - start)

    def _stripes(self, nbytes: int) -> Iterator[tuple[int, int, int, int]]:
        at = 0
        for start in range(0, nbytes, self.stripe):
            stop = min(start + self.stripe, nbytes)
            size = self._code.piece_bytes(stop - start)
            yield start, stop, at, size
            at += size


def best_code(scheme: Scheme) -> str:
    """``xor`` where that is enough, else the fastest Reed-Solomon code of pyeclib there is here.

    Raises:
        ConfigError: there is none.
    """
    if scheme.m == 1:
        return "xor"
    valid = _pyeclib(scheme).VALID_EC_TYPES
    for backend in _BACKENDS:
        if backend in valid:
            return backend
    raise ConfigError(f"parity {scheme}: pyeclib has none of {', '.join(_BACKENDS)} here")


class _Xor:
    """One parity fragment: the exclusive or of the others."""

    def __init__(self, scheme: Scheme) -> None:
        if scheme.m != 1:
            raise ConfigError(f"parity {scheme}: xor makes one parity fragment")
        self._k = scheme.k

    def piece_bytes(self, nbytes: int) -> int:
        return -(-nbytes // self._k)

    def encode(self, stripe: Bytes) -> Sequence[Bytes]:
        rows = self._rows(stripe)
        return [*rows, _xor(list(rows))]

    def decode(self, pieces: Mapping[int, Bytes], nbytes: int) -> Bytes:
        rows = [pieces.get(number) for number in range(self._k)]
        lost = _xor(list(pieces.values())) if self._k in pieces else None
        return np.concatenate([lost if row is None else row for row in rows])

    def _rows(self, stripe: Bytes) -> Bytes:
        size = self.piece_bytes(len(stripe))
        if size * self._k != len(stripe):
            stripe = np.concatenate([stripe, np.zeros(size * self._k - len(stripe), np.uint8)])
        return stripe.reshape(self._k, size)


def _xor(rows: Sequence[Bytes]) -> Bytes:
    result = rows[0].copy()
    for row in rows[1:]:
        np.bitwise_xor(result, row, out=result)
    return result


class _Solomon:
    """A Reed-Solomon code of pyeclib. A fragment is stored as it comes, with its 80-byte header."""

    def __init__(self, scheme: Scheme, backend: str) -> None:
        library = _pyeclib(scheme)
        if backend not in _BACKENDS or backend not in library.VALID_EC_TYPES:
            raise ConfigError(f"parity {scheme}: code {backend!r} is not available here")
        self._driver = library.ECDriver(k=scheme.k, m=scheme.m, ec_type=backend)
        _keep_freed_memory()
        self._sizes: dict[int, int] = {}

    def piece_bytes(self, nbytes: int) -> int:
        if nbytes not in self._sizes:
            self._sizes[nbytes] = len(self.encode(np.zeros(nbytes, np.uint8))[0])
        return self._sizes[nbytes]

    def encode(self, stripe: Bytes) -> Sequence[bytes]:
        # An array is taken without the copy that making bytes of it would be.
        fragments: list[bytes] = self._driver.encode(stripe)
        return fragments

    def decode(self, pieces: Mapping[int, Bytes], nbytes: int) -> bytes:
        stripe: bytes = self._driver.decode([piece.tobytes() for piece in pieces.values()])
        return stripe


def _keep_freed_memory() -> None:
    """Let the C library keep the fragments' memory for the next call.

    glibc gives freed memory back to the system when it is more than twice the largest block that
    was ever mapped and freed. Until a process has freed a large one, that is after every stripe.
    """
    np.empty(16 * 2**20, np.uint8)


def _pyeclib(scheme: Scheme) -> Any:
    try:
        from pyeclib import ec_iface
    except ImportError as error:
        raise ConfigError(
            f"parity {scheme} needs pyeclib ({error}); pip install 'sapwood[parity]', "
            "or use one parity fragment"
        ) from error
    return ec_iface
