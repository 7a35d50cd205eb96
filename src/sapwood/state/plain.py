"""Plain values to JSON and back, without losing what JSON cannot say. No pickle, ever.

Tuples, sets, bytes, tensors, counters, numpy scalars and arrays, non-finite floats and dictionaries
with keys that are not text are written as ``{"$": kind, "v": value}``.
"""

from __future__ import annotations

import base64
import math
from collections import Counter, deque
from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sapwood.errors import CheckpointError

__all__ = ["from_plain", "to_plain"]

_MARK = "$"


def to_plain(value: Any, where: str) -> Any:
    """The JSON form of ``value``; ``where`` names it in errors.

    Raises:
        CheckpointError: something in it is no plain value.
    """
    if value is None or isinstance(value, (bool, str)) or type(value) is int:
        return value
    if isinstance(value, float):
        plain = float(value)
        return plain if math.isfinite(plain) else _tag("float", repr(plain))
    if isinstance(value, (list, tuple, set, frozenset, deque)):
        return _sequence(value, where)
    if isinstance(value, Mapping):
        return _mapping(value, where)
    if isinstance(value, (bytes, bytearray)):
        return _tag("bytes", base64.b64encode(value).decode())
    if isinstance(value, Tensor):
        return _tensor(value)
    if isinstance(value, (np.ndarray, np.generic)):
        return _tag("numpy", to_plain(torch.from_numpy(np.atleast_1d(value).copy()), where))
    if isinstance(value, (int, PurePath)):  # an IntEnum, a path: what counts is its value
        return int(value) if isinstance(value, int) else str(value)
    raise CheckpointError(
        f"{where} is a {type(value).__name__}, which a checkpoint cannot hold: it keeps numbers, "
        "text, bytes, tensors, and lists, tuples, sets and dictionaries of them"
    )


def _tag(kind: str, value: Any) -> dict[str, Any]:
    return {_MARK: kind, "v": value}


def _sequence(value: Any, where: str) -> Any:
    items = [to_plain(v, f"{where}[{n}]") for n, v in enumerate(value)]
    if isinstance(value, list):
        return items
    kind = next(
        k for k in ("tuple", "frozenset", "set", "deque") if isinstance(value, _SEQUENCES[k])
    )
    return _tag(kind, items)


def _mapping(value: Mapping[Any, Any], where: str) -> Any:
    simple = all(isinstance(k, str) for k in value) and _MARK not in value
    if simple and not isinstance(value, Counter):
        return {k: to_plain(v, f"{where}[{k!r}]") for k, v in value.items()}
    pairs = [
        [to_plain(k, f"a key of {where}"), to_plain(v, f"{where}[{k!r}]")] for k, v in value.items()
    ]
    return _tag("counter" if isinstance(value, Counter) else "dict", pairs)


def _tensor(value: Tensor) -> dict[str, Any]:
    flat = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    text = base64.b64encode(flat.numpy().tobytes()).decode()
    dtype = str(value.dtype).removeprefix("torch.")
    return _tag("tensor", {"dtype": dtype, "shape": list(value.shape), "bytes": text})


_SEQUENCES: dict[str, Any] = {
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
    "deque": deque,
}


def from_plain(value: Any) -> Any:
    """The reverse of ``to_plain``."""
    if isinstance(value, list):
        return [from_plain(v) for v in value]
    if not isinstance(value, dict):
        return value
    if _MARK not in value:
        return {k: from_plain(v) for k, v in value.items()}
    kind, held = value[_MARK], value["v"]
    if kind in _SEQUENCES:
        return _SEQUENCES[kind](from_plain(held))
    if kind in ("dict", "counter"):
        pairs = {from_plain(k): from_plain(v) for k, v in held}
        return Counter(pairs) if kind == "counter" else pairs
    return _SCALARS[kind](held)


def _to_tensor(held: Mapping[str, Any]) -> Tensor:
    raw = bytearray(base64.b64decode(held["bytes"]))
    dtype = getattr(torch, held["dtype"])
    flat = torch.frombuffer(raw, dtype=dtype) if raw else torch.empty(0, dtype=dtype)
    return flat.reshape(held["shape"])


_SCALARS: dict[str, Any] = {
    "float": float,
    "bytes": base64.b64decode,
    "tensor": _to_tensor,
    "numpy": lambda held: from_plain(held).numpy(),
}
