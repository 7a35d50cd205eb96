"""A tensor as what differs from another one: exclusive or, bytes of equal weight together, zstd.

Weights that were trained a little further differ in few of their upper bits, so that these become
zeros, which compress. A tensor is cut into chunks, each a frame of its own, and a table in front
says where the frames are: so some rows of it can be read without the rest.

    magic, bytes of the tensor, bytes of an element, number of chunks
    size of each frame; the upper bit says that the chunk stands there as it is
    frames
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt

from sapwood.errors import ConfigError, Damaged

__all__ = ["CHUNK", "ColdTable", "decode_chunk", "encode", "head_bytes", "needs_zstd"]

CHUNK = 2**20
"""Bytes of a tensor in a frame; a multiple of every element's size."""
_MAGIC = b"SWCOLD01"
_HEAD = struct.Struct("<8sQII")
_AS_IT_IS = 1 << 31
_LEVEL = 3
_WORTH = 0.9
"""A form that takes more than this share of the plain one is not worth its reading."""
Bytes = npt.NDArray[np.uint8]


def needs_zstd() -> ModuleType:
    """The package that compresses.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        import zstandard
    except ModuleNotFoundError:
        raise ConfigError(
            "tensors in cold form need the package zstandard: pip install 'sapwood[compression]'"
        ) from None
    return zstandard


def encode(data: memoryview, base: memoryview, itemsize: int) -> bytes | None:
    """A tensor as what differs from its base, of the same size; None if that saves too little."""
    if len(data) % itemsize:
        itemsize = 1
    # Large blocks at fast levels: a training's changes are noise, in which there is little to find.
    compressor = needs_zstd().ZstdCompressor(level=_LEVEL, write_checksum=True)
    frames: list[bytes] = []
    sizes: list[int] = []
    limit = int(_WORTH * len(data))
    total = head_bytes(len(data))
    for start in range(0, len(data), CHUNK):
        planes = _planes(data[start : start + CHUNK], base[start : start + CHUNK], itemsize)
        frame = compressor.compress(planes)
        raw = len(frame) >= len(planes)
        frames.append(planes.tobytes() if raw else frame)
        sizes.append(len(frames[-1]) | (_AS_IT_IS if raw else 0))
        total += len(frames[-1])
        if total > limit:
            return None
    head = _HEAD.pack(_MAGIC, len(data), itemsize, len(frames))
    return b"".join((head, np.array(sizes, "<u4").tobytes(), *frames))


def _planes(data: memoryview, base: memoryview, itemsize: int) -> Bytes:
    differs = np.bitwise_xor(np.frombuffer(data, np.uint8), np.frombuffer(base, np.uint8))
    return np.ascontiguousarray(differs.reshape(-1, itemsize).T).reshape(-1)


def head_bytes(nbytes: int) -> int:
    """Size of what stands before the frames of a tensor of so many bytes."""
    return _HEAD.size + 4 * -(-nbytes // CHUNK)


@dataclass(frozen=True)
class ColdTable:
    """Where the chunks of a tensor are."""

    nbytes: int
    itemsize: int
    starts: Sequence[int]
    """Of each frame in what is stored, and the end of the last one."""
    as_they_are: Sequence[bool]

    @classmethod
    def decode(cls, head: memoryview, nbytes: int, stored: int) -> ColdTable:
        """Read it; ``nbytes`` and ``stored`` are what the catalog says of the tensor.

        Raises:
            Damaged: it is not what was written.
        """
        magic, size, itemsize, count = _HEAD.unpack_from(head)
        if magic != _MAGIC or size != nbytes or len(head) != _HEAD.size + 4 * count:
            raise Damaged("a tensor in cold form does not begin as one of its size does")
        sizes: npt.NDArray[np.uint32] = np.frombuffer(head, "<u4", offset=_HEAD.size)
        lengths = (sizes & np.uint32(_AS_IT_IS - 1)).astype(np.int64)
        ends = np.concatenate(([0], np.cumsum(lengths))) + len(head)
        if int(ends[-1]) != stored or itemsize not in (1, 2, 4, 8, 16):
            raise Damaged("a tensor in cold form is truncated, or its table is damaged")
        return cls(size, itemsize, ends.tolist(), (sizes >= _AS_IT_IS).tolist())

    def chunk(self, number: int) -> tuple[int, int]:
        """First byte of a chunk in the tensor, and how many it has."""
        start = number * CHUNK
        return start, min(CHUNK, self.nbytes - start)


def decode_chunk(
    table: ColdTable, number: int, frame: memoryview, base: memoryview, out: memoryview
) -> None:
    """Fill ``out`` with a chunk of a tensor, given the same chunk of its base.

    Raises:
        Damaged: the frame is not what was written.
    """
    _, nbytes = table.chunk(number)
    planes = frame if table.as_they_are[number] else _decompressed(frame, nbytes)
    if len(planes) != nbytes:
        raise Damaged(f"a chunk of a tensor in cold form has {len(planes)} bytes, not {nbytes}")
    differs = np.frombuffer(planes, np.uint8).reshape(table.itemsize, -1).T.reshape(-1)
    np.bitwise_xor(differs, np.frombuffer(base, np.uint8), out=np.frombuffer(out, np.uint8))


def _decompressed(frame: memoryview, nbytes: int) -> Any:
    zstandard = needs_zstd()
    try:
        return zstandard.ZstdDecompressor().decompress(frame, max_output_size=nbytes)
    except zstandard.ZstdError as error:
        raise Damaged(f"a chunk of a tensor in cold form cannot be read: {error}") from error
