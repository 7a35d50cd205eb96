"""Arrays in .npy and .safetensors files, as memory; what is in the file is checked first."""

from __future__ import annotations

import tokenize
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sapwood.data.write.table import Column
from sapwood.errors import ConfigError, DataError
from sapwood.state.safetensors import TORCH_NAMES, FilePart, read_header

__all__ = ["read_npy", "read_safetensors"]


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
        parts = read_header(file).parts
        columns = {part.name: _column(file, part) for part in parts}
    except (ValueError, ArithmeticError, OSError) as error:
        raise DataError(f"{file}: not a sound .safetensors file: {_line(error)}") from error
    for name in chosen or ():
        if name not in columns:
            known = ", ".join(sorted(columns)[:10])
            raise ConfigError(f"{file} has no tensor {name!r}; it has {known}")
    return [columns[name] for name in (sorted(columns) if chosen is None else chosen)]


def _column(file: Path, part: FilePart) -> Column:
    rows = part.shape[0] if part.shape else 1
    width = part.nbytes // rows if rows else 0
    data: Any = np.empty((rows, width), np.uint8)
    if part.nbytes:
        data = np.memmap(file, np.uint8, "r", part.start, (rows, width)).view(np.ndarray)
    return Column(name=part.name, data=data, dtype=TORCH_NAMES[part.dtype], shape=part.shape)


def _line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
