"""Raw bytes of a tensor as numbers, also for dtypes numpy does not know."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from sapwood.state.catalog import DTYPE_BYTES

__all__ = ["Difference", "compare", "decode"]

_NUMPY = {
    "BOOL": "u1",
    "U8": "u1",
    "I8": "i1",
    "I16": "<i2",
    "U16": "<u2",
    "F16": "<f2",
    "I32": "<i4",
    "U32": "<u4",
    "F32": "<f4",
    "C64": "<c8",
    "F64": "<f8",
    "I64": "<i8",
    "U64": "<u8",
}


@dataclass
class Difference:
    """How far two tensors of the same shape and dtype are apart."""

    nbytes: int = 0
    elements: int = 0
    largest: float = 0.0
    """Of the differing elements that are numbers on both sides."""
    not_numbers: int = 0
    """Differing elements that are not a number, or infinite, on one side or both."""

    def add(self, other: Difference) -> None:
        """Count another part of the tensor in."""
        self.nbytes += other.nbytes
        self.elements += other.elements
        self.largest = max(self.largest, other.largest)
        self.not_numbers += other.not_numbers


def decode(data: Any, dtype: str) -> npt.NDArray[Any]:
    """Elements in a dtype numpy can subtract."""
    if dtype == "BF16":  # the upper half of a float32
        wide = np.frombuffer(data, "<u2").astype(np.uint32) << 16
        return wide.view(np.float32)
    if dtype == "F8_E5M2":  # the upper half of a float16
        return (np.frombuffer(data, "u1").astype(np.uint16) << 8).view(np.float16)
    if dtype == "F8_E4M3":
        values: npt.NDArray[Any] = _e4m3()[np.frombuffer(data, "u1")]
        return values
    return np.frombuffer(data, _NUMPY[dtype])


def compare(left: Any, right: Any, dtype: str) -> Difference:
    """Compare bytes of two tensors at the same place; whole elements of them."""
    width = DTYPE_BYTES[dtype]
    bytes_differ = np.frombuffer(left, "u1") != np.frombuffer(right, "u1")
    differ = bytes_differ.reshape(-1, width).any(axis=1)
    count = int(differ.sum())
    if not count:
        return Difference()
    kind = np.complex128 if dtype == "C64" else np.float64
    with np.errstate(all="ignore"):
        ours, theirs = (decode(side, dtype)[differ].astype(kind) for side in (left, right))
        apart = np.abs(ours - theirs)
    finite = np.isfinite(apart)
    return Difference(
        nbytes=int(bytes_differ.sum()),
        elements=count,
        largest=float(apart[finite].max()) if finite.any() else 0.0,
        not_numbers=int(count - finite.sum()),
    )


@cache
def _e4m3() -> npt.NDArray[np.float32]:
    codes = np.arange(256)
    exponent, fraction = (codes >> 3) & 15, (codes & 7) / 8
    size = np.where(exponent == 0, fraction * 2.0**-6, (1 + fraction) * 2.0 ** (exponent - 7.0))
    size = np.where(codes & 127 == 127, np.nan, size)
    return np.where(codes & 128, -size, size).astype(np.float32)
