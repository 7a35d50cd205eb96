"""Tensors inside lists, tuples and dicts: the arguments of an operation."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

__all__ = ["tensors_in"]


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Every tensor in ``value``."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from tensors_in(part)
    elif isinstance(value, dict):
        yield from tensors_in(list(value.values()))
