"""Cutting a bucket into slices, and adding up one of them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

__all__ = ["add_up", "cut"]

# Slices begin at a cache line, so that no two ranks write to the same one.
_LINE = 64
# torch uses a team of threads from this many elements on; the cores belong to back-propagation.
_CHUNK = 32768
# With one thread larger ones do as well, while a sum stays in a core's cache until it is whole.
_CACHED = 131072
_SIXTEEN_BITS = (torch.bfloat16, torch.float16)


def cut(length: int, element_size: int, count: int) -> list[slice]:
    """``count`` slices of nearly equal size; some are empty where there is too little to cut."""
    unit = max(1, _LINE // element_size)
    units = -(-length // unit)
    edges = [min(length, units * n // count * unit) for n in range(count + 1)]
    edges[-1] = length
    return [slice(a, b) for a, b in pairwise(edges)]


def add_up(parts: Sequence[Tensor], out: Tensor) -> None:
    """The sum of ``parts`` in their order; 16-bit parts are added in float32 and rounded once."""
    length = out.numel()
    alone = torch.get_num_threads() == 1
    whole = alone and len(parts) <= 2 and out.dtype not in _SIXTEEN_BITS
    chunk = length if whole else _CACHED if alone else _CHUNK
    for start in range(0, length, max(chunk, 1)):
        stretch = slice(start, min(start + chunk, length))
        _add([part[stretch] for part in parts], out[stretch])


def _add(parts: Sequence[Tensor], out: Tensor) -> None:
    if len(parts) == 1:
        out.copy_(parts[0])
    elif out.dtype in _SIXTEEN_BITS and len(parts) > 2:
        total = parts[0].float()
        for part in parts[1:]:
            total += part
        out.copy_(total)
    else:
        torch.add(parts[0], parts[1], out=out)
        for part in parts[2:]:
            out += part
