"""Headers of .safetensors files: read with every number checked, and made.

A file may come from anywhere. Nothing in its header is believed before it was compared with the
file's size, with the sizes of dtypes, and with what else is said to lie there.
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sapwood.regular import open_regular
from sapwood.state.catalog import DTYPE_BYTES

__all__ = ["MODEL_NAMES", "TORCH_NAMES", "FilePart", "Header", "make_header", "read_header"]

TORCH_NAMES = {
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "F8_E5M2": "float8_e5m2",
    "F8_E4M3": "float8_e4m3fn", "I16": "int16", "U16": "uint16", "F16": "float16",
    "BF16": "bfloat16", "I32": "int32", "U32": "uint32", "F32": "float32", "C64": "complex64",
    "F64": "float64", "I64": "int64", "U64": "uint64",
}  # fmt: skip
"""torch's names of the dtypes that records and checkpoints may have."""
MODEL_NAMES = {
    "U64": "uint64", "I64": "int64", "F64": "float64", "C64": "complex64", "F32": "float32",
    "U32": "uint32", "I32": "int32", "BF16": "bfloat16", "F16": "float16", "U16": "uint16",
    "I16": "int16", "F8_E5M2FNUZ": "float8_e5m2fnuz", "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E8M0": "float8_e8m0fnu", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2",
    "I8": "int8", "U8": "uint8", "F4": "float4_e2m1fn_x2", "BOOL": "bool",
}  # fmt: skip
"""The same of all that models may have, in the order in which the format's own writer puts them:
wide ones first, so that each tensor is aligned. ``F4`` counts elements, torch pairs of them."""
_BITS = {"F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "F8_E8M0": 8, "F4": 4} | {
    name: 8 * nbytes for name, nbytes in DTYPE_BYTES.items()
}
_LENGTH = struct.Struct("<Q")
_MOST_HEADER = 100 * 2**20


@dataclass(frozen=True, slots=True)
class FilePart:
    """A tensor in a file."""

    name: str
    dtype: str
    """safetensors' name of it."""
    shape: tuple[int, ...]
    start: int
    """Its first byte in the file."""
    nbytes: int


@dataclass(frozen=True)
class Header:
    """What is in a file."""

    parts: tuple[FilePart, ...]
    """In the order of their places."""
    metadata: Mapping[str, str]


def read_header(file: Path, dtypes: Collection[str] = TORCH_NAMES) -> Header:
    """What a file says is in it; ``dtypes`` are those that are taken.

    Raises:
        ValueError: it is damaged, or is no such file; says why.
        OSError: it cannot be read.
    """
    size = file.stat().st_size
    with os.fdopen(open_regular(file), "rb") as opened:
        start = opened.read(_LENGTH.size)
        length = _LENGTH.unpack(start)[0] if len(start) == _LENGTH.size else 0
        if not 2 <= length <= min(size - _LENGTH.size, _MOST_HEADER):
            raise ValueError(f"its header has {length} bytes, and the file {size}")
        text = opened.read(length)
    return parse_header(text, size, dtypes)


def parse_header(text: bytes, size: int, dtypes: Collection[str] = TORCH_NAMES) -> Header:
    """What the JSON of a header says of a file of that size.

    Raises:
        ValueError: it cannot be.
    """
    try:
        table = json.loads(text, object_pairs_hook=_without_doubles)
        metadata = table.pop("__metadata__", None) or {}
        begin = _LENGTH.size + len(text)
        parts = sorted(
            (_part(name, facts, begin, dtypes) for name, facts in table.items()),
            key=lambda part: (part.start, part.nbytes),
        )
    except (TypeError, KeyError, AttributeError, IndexError, RecursionError) as error:
        raise ValueError(f"its header is not one: {error}") from error
    at = begin
    for part in parts:
        if part.start != at:
            raise ValueError(f"{part.name} begins at byte {part.start}, expected {at}")
        at += part.nbytes
    if at != size:
        raise ValueError(f"expected {at} bytes by its header, found {size}")
    return Header(tuple(parts), {str(key): str(value) for key, value in metadata.items()})


def _without_doubles(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("its header has a name twice")
    return found


def _part(name: str, facts: Mapping[str, Any], begin: int, dtypes: Collection[str]) -> FilePart:
    dtype, shape = facts["dtype"], tuple(facts["shape"])
    low, high = facts["data_offsets"]
    if dtype not in dtypes:
        raise ValueError(f"{name} has the dtype {dtype!r}, which is not known")
    if not all(type(one) is int and one >= 0 for one in (*shape, low, high)):
        raise ValueError(f"{name}: expected a shape and a place of whole numbers")
    if 8 * (high - low) != math.prod(shape) * _BITS[dtype]:
        raise ValueError(f"{name} has {high - low} bytes, which is not what {shape} needs")
    return FilePart(name, dtype, shape, begin + low, high - low)


def make_header(
    tensors: Iterable[tuple[str, str, Sequence[int]]], metadata: Mapping[str, str] | None = None
) -> bytes:
    """The first bytes of a file with these tensors (name, dtype, shape), one after the other."""
    table: dict[str, Any] = {"__metadata__": {"format": "pt", **(metadata or {})}}
    at = 0
    for name, dtype, shape in tensors:
        end = at + math.prod(shape) * _BITS[dtype] // 8
        table[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(table, separators=(",", ":"), ensure_ascii=False).encode()
    padded = -(-len(text) // 8) * 8  # so that tensors are aligned
    return _LENGTH.pack(padded) + text.ljust(padded)
