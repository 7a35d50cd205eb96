"""Plain values to JSON and back, without losing what JSON cannot say. No pickle, ever.

How values are written is said in ``state.copier``; what older versions wrote is read as well.
"""

from __future__ import annotations

import base64
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping
from pathlib import PosixPath, PurePosixPath, PureWindowsPath
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from sapwood.errors import CheckpointError
from sapwood.state.copier import FACTORIES, Copier
from sapwood.state.dtypes import read_dtype
from sapwood.state.packed import MARK

__all__ = ["from_plain", "to_plain"]

_ATOMS = frozenset({str, bool, int, float, type(None)})
_PATHS = {kind.__name__: kind for kind in (PosixPath, PurePosixPath, PureWindowsPath)}


def to_plain(value: Any, where: str) -> Any:
    """The JSON form of ``value``, with all its bytes in it; ``where`` names it in errors.

    Raises:
        CheckpointError: something in it would not come back as it was.
    """
    copier = Copier()
    plain = copier.take(value, where)
    for blob in copier.blobs:
        blob.inline()
    return plain


def from_plain(value: Any) -> Any:
    """The value a JSON form stands for; ``state.packed`` puts blobs in their places before.

    Raises:
        CheckpointError: it is of a kind that this version does not know, or not what was written.
    """
    if isinstance(value, list):
        return list(value) if set(map(type, value)) <= _ATOMS else [from_plain(v) for v in value]
    if not isinstance(value, dict):
        return value
    if MARK not in value:
        return {k: from_plain(v) for k, v in value.items()}
    read = _KINDS.get(value[MARK])
    if read is None:
        raise CheckpointError(
            f"a saved value is of kind {value[MARK]!r}, which this version does not know; restore "
            "it with the version that saved it, or a newer one"
        )
    try:
        return read(value["v"])
    except CheckpointError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise CheckpointError(
            f"a saved {value[MARK]} cannot be read: {type(error).__name__}: {error}"
        ) from error


def _raw(held: Any) -> Any:
    """The bytes of a blob; older versions had them in place of what says where they are."""
    found = held if isinstance(held, str) else held["bytes"]
    return base64.b64decode(found) if isinstance(found, str) else found


def _to_tensor(held: Mapping[str, Any]) -> Tensor:
    dtype = getattr(torch, held["dtype"])
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{held['dtype']!r} is no dtype of torch")
    memory = bytearray(_raw(held))
    if memory:
        value = torch.frombuffer(memory, dtype=torch.uint8).view(dtype).reshape(held["shape"])
    else:
        value = torch.empty(held["shape"], dtype=dtype)
    if held.get("parameter"):
        return nn.Parameter(value, requires_grad=bool(held.get("grad")))
    return value.requires_grad_() if held.get("grad") else value


def _to_array(held: Mapping[str, Any]) -> np.ndarray[Any, Any]:
    dtype, shape = read_dtype(held["dtype"]), tuple(held["shape"])
    memory = bytearray(_raw(held))
    if not memory:
        return np.zeros(shape, dtype)
    return np.ndarray(shape, dtype, buffer=memory, order=held.get("order", "C"))


def _to_pairs(held: Any) -> dict[Any, Any]:
    return {from_plain(k): from_plain(v) for k, v in held}


def _to_ordered(held: Mapping[str, Any]) -> OrderedDict[Any, Any]:
    found = OrderedDict(_to_pairs(held["items"]))
    if "metadata" in held:
        found._metadata = from_plain(held["metadata"])  # type: ignore[attr-defined]
    return found


def _to_deque(held: Any) -> deque[Any]:
    if isinstance(held, dict) and MARK not in held:
        return deque(from_plain(held["items"]), held["maxlen"])
    return deque(from_plain(held))  # of an older version, which forgot how long it may be


def _to_dtype(held: str) -> torch.dtype:
    found = getattr(torch, held)
    if not isinstance(found, torch.dtype):
        raise TypeError(f"{held!r} is no dtype of torch")
    return found


_KINDS: dict[str, Callable[[Any], Any]] = {
    "int": lambda held: int(held, 16),
    "float": float,
    "complex": lambda held: complex(*from_plain(held)),
    "floats": lambda held: np.frombuffer(_raw(held), "<f8").tolist(),
    "ints": lambda held: np.frombuffer(_raw(held), "<i8").tolist(),
    "tuple": lambda held: tuple(from_plain(held)),
    "set": lambda held: set(from_plain(held)),
    "frozenset": lambda held: frozenset(from_plain(held)),
    "deque": _to_deque,
    "range": lambda held: range(*from_plain(held)),
    "dict": _to_pairs,
    "counter": lambda held: Counter(_to_pairs(held)),
    "ordered": _to_ordered,
    "defaultdict": lambda held: defaultdict(FACTORIES[held["factory"]], _to_pairs(held["items"])),
    "bytes": lambda held: bytes(_raw(held)),
    "bytearray": lambda held: bytearray(_raw(held)),
    "tensor": _to_tensor,
    "array": _to_array,
    "scalar": lambda held: _to_array(held)[()],
    "numpy": lambda held: from_plain(held).numpy(),  # of an older version
    "numpy text": np.str_,
    "numpy bytes": lambda held: np.bytes_(_raw(held)),
    "size": lambda held: torch.Size(from_plain(held)),
    "dtype": _to_dtype,
    "device": torch.device,
    "path": lambda held: _PATHS[held[0]](held[1]),
}
