"""A tensor's elements as numbers that numpy can count, a block of bytes at a time."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

__all__ = ["Values", "is_complex", "measured", "values_of"]

Values = npt.NDArray[Any]
# Numbers that numpy does not know; float32 holds each of them exactly.
_NARROW = ("bfloat16", "float8_")
_PAIR = "float4_e2m1fn_x2"
"""Two numbers in a byte, the first one in its low half."""
_HALVES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
_FOURS = np.concatenate((_HALVES, -_HALVES))


def is_complex(dtype: str) -> bool:
    """Whether elements have two parts."""
    return dtype.startswith("complex")


def values_of(block: memoryview, dtype: str) -> Values:
    """The elements of a block; whole elements only."""
    if dtype.startswith(_NARROW):
        narrow = torch.frombuffer(block, dtype=getattr(torch, dtype))
        return narrow.to(torch.float32).numpy()
    if dtype == _PAIR:
        both = np.frombuffer(block, np.uint8)
        return _FOURS[np.stack((both & 15, both >> 4), -1).reshape(-1)]
    if dtype == "complex32":
        parts = np.frombuffer(block, np.float16).astype(np.float32)
        found: Values = parts.view(np.complex64)
        return found
    return np.frombuffer(block, dtype)


def measured(block: memoryview, dtype: str) -> Values:
    """The same as real numbers: of complex elements the absolute values."""
    found = values_of(block, dtype)
    return np.abs(found.astype(np.complex128)) if is_complex(dtype) else found
