"""Arrays in .npy and .safetensors files, as memory; what is in the file is checked first."""

from __future__ import annotations

import json
import math
import tokenize
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sapwood.data.write.table import Column
from sapwood.errors import ConfigError, DataError
from sapwood.state.catalog import DTYPE_BYTES

__all__ = ["read_npy", "read_safetensors"]

_MOST_HEADER = 100 * 2**20
_LENGTH = 8
_TORCH_NAMES = {
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "F8_E5M2": "float8_e5m2",
    "F8_E4M3": "float8_e4m3fn", "I16": "int16", "U16": "uint16", "F16": "float16",
    "BF16": "bfloat16", "I32": "int32", "U32": "uint32", "F32": "float32", "C64": "complex64",
    "F64": "float64", "I64": "int64", "U64": "uint64",
}  # fmt: skip


def read_npy(file: Path) -> list[Column]:
    """The array of a .npy file; nothing is ever unpickled.

    Raises:
        DataError: it is damaged, or holds Python objects.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # numpy warns of headers that Python 2 has written
            mapped = np.lib.format.open_memmap(file, mode="r")
        expected, size = mapped.offset + mapped.nbytes, file.stat().st_size
    except (ValueError, TypeError, SyntaxError, ArithmeticError, MemoryError, OSError) as error:
        raise DataError(f"{file}: not a sound .npy file: {_line(error)}") from error
    except tokenize.TokenError as error:
        raise DataError(f"{file}: not a sound .npy file: {_line(error)}") from error
    if expected != size:
        raise DataError(
            f"{file}: expected {expected} bytes by its header, found {size}; it is damaged, or "
            "several arrays were saved to it"
        )
    data = mapped.view(np.ndarray)
    plain = data.dtype.kind in "biufc" and data.dtype.isnative
    name = data.dtype.name if plain else str(data.dtype)
    return [Column(name=file.stem, data=data, dtype=name, shape=data.shape)]


def read_safetensors(file: Path, chosen: Sequence[str] | None) -> list[Column]:
    """The tensors of a .safetensors file, all or those chosen, by name.

    Raises:
        ConfigError: one that was chosen is not there.
        DataError: it is damaged.
    """
    try:
        header, start, size = _header(file)
        entries = {name: facts for name, facts in header.items() if name != "__metadata__"}
        columns = {name: _column(file, name, facts, start) for name, facts in entries.items()}
        ends = [int(facts["data_offsets"][1]) for facts in entries.values()]
    except (ValueError, TypeError, KeyError, IndexError, ArithmeticError, OSError) as error:
        raise DataError(f"{file}: not a sound .safetensors file: {_line(error)}") from error
    if start + max(ends, default=0) != size:
        raise DataError(
            f"{file}: expected {start + max(ends, default=0)} bytes by its header, found {size}"
        )
    for name in chosen or ():
        if name not in columns:
            known = ", ".join(sorted(columns)[:10])
            raise ConfigError(f"{file} has no tensor {name!r}; it has {known}")
    return [columns[name] for name in (sorted(columns) if chosen is None else chosen)]


def _header(file: Path) -> tuple[dict[str, Any], int, int]:
    size = file.stat().st_size
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(_LENGTH), "little")
        if not 2 <= length <= min(size - _LENGTH, _MOST_HEADER):
            raise ValueError(f"its header has {length} bytes, and the file {size}")
        header = json.loads(opened.read(length))
    if not isinstance(header, dict):
        raise ValueError("its header is not a JSON object")
    return header, _LENGTH + length, size


def _column(file: Path, name: str, facts: dict[str, Any], start: int) -> Column:
    dtype, shape = facts["dtype"], tuple(facts["shape"])
    low, high = facts["data_offsets"]
    if dtype not in DTYPE_BYTES:
        raise ValueError(f"{name} has the dtype {dtype!r}, which is not known")
    if not all(type(one) is int and one >= 0 for one in (*shape, low, high)):
        raise ValueError(f"{name}: expected a shape and a place of whole numbers")
    if high - low != math.prod(shape) * DTYPE_BYTES[dtype]:
        raise ValueError(f"{name} has {high - low} bytes, which is not what {shape} needs")
    rows = shape[0] if shape else 1
    width = (high - low) // rows if rows else 0
    data: Any = np.empty((rows, width), np.uint8)
    if high > low:
        data = np.memmap(file, np.uint8, "r", start + low, (rows, width)).view(np.ndarray)
    return Column(name=name, data=data, dtype=_TORCH_NAMES[dtype], shape=shape)


def _line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
