"""Copies of a state's values, as JSON and raw bytes; ``state.plain`` reads them.

A value comes back as it was (type, dtype, byte order, shape), or is refused, by name. What JSON
cannot say is written as ``{"$": kind, "v": value}``. The bytes of tensors, arrays and long rows of
numbers are not part of the JSON: a ``Copier`` lists them, and whoever stores the copy says in the
value where they went.
"""

from __future__ import annotations

import math
import reprlib
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import PosixPath, PurePosixPath, PureWindowsPath
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from sapwood.errors import CheckpointError
from sapwood.state.dtypes import describe_dtype
from sapwood.state.packed import MARK, Blob

__all__ = ["FACTORIES", "Copier"]

_ATOMS = frozenset({str, bool, type(None)})
_INT64 = 2**63
_ROW = 256
"""Numbers in a row from which on they are kept as raw bytes: JSON of many is long to make."""
_DEEPEST = 100
"""Containers in containers; what goes deeper contains itself, or would end in a RecursionError."""


class _Key(NamedTuple):
    """A step of a path: to a key, and not to what it leads to."""

    key: Any


class Copier:
    """Copies values as they are now: later changes to what was copied do not reach the copy."""

    def __init__(
        self, *, copies: bool = True, keep: Callable[[Tensor, str], Any] | None = None
    ) -> None:
        """With ``copies=False`` it only looks whether values could be copied.

        ``keep`` takes tensors over, with the path to each: what it returns stands for the tensor
        in the copy, and its bytes are not taken.
        """
        self.blobs: list[Blob] = []
        """The bytes that belong to what was taken."""
        self._copies, self._keep = copies, keep
        self._where = ""
        self._path: list[Any] = []

    def take(self, value: Any, where: str) -> Any:
        """A copy of ``value`` in JSON form, but for its blobs; ``where`` names it in errors.

        Raises:
            CheckpointError: something in it is of a kind that would not come back as it was.
        """
        self._where, self._path = where, []
        return self._value(value)

    def _value(self, value: Any) -> Any:
        kind = type(value)
        if kind in _ATOMS:
            return value
        copy = _KINDS.get(kind)
        if copy is not None:
            return copy(self, value)
        if isinstance(value, np.generic):
            return _tag("scalar", self._numpy(np.asarray(value)))
        raise self._refused(
            f"is a {kind.__module__}.{kind.__qualname__}, which a checkpoint cannot hold: it keeps "
            "numbers, text, bytes, tensors, numpy values, and lists, tuples, sets and dictionaries "
            "of them, but no classes of your own: convert it in state_dict()"
        )

    def _refused(self, why: str) -> CheckpointError:
        steps = "".join(
            f"[key {reprlib.repr(step.key)}]" if isinstance(step, _Key) else f"[{step!r}]"
            for step in self._path
        )
        return CheckpointError(f"{self._where}{steps} {why}")

    def _steps(self, between: str) -> str:
        """Where the value is that is looked at, as text."""
        keys = (step.key if isinstance(step, _Key) else step for step in self._path)
        return between.join(map(str, keys))

    def _blob(self, data: Any, **facts: Any) -> dict[str, Any]:
        if self._copies:
            self.blobs.append(Blob(facts, memoryview(data).cast("B") if len(data) else _NOTHING))
        return facts

    # -- numbers -----------------------------------------------------------------------------

    def _int(self, value: int) -> Any:
        # Python refuses to read integers of some thousand decimal digits.
        return value if -_INT64 <= value < _INT64 else _tag("int", hex(value))

    def _float(self, value: float) -> Any:
        return value if math.isfinite(value) else _tag("float", repr(value))

    def _complex(self, value: complex) -> Any:
        return _tag("complex", [self._float(value.real), self._float(value.imag)])

    # -- containers --------------------------------------------------------------------------

    def _each(self, pairs: Iterable[tuple[Any, Any]]) -> list[Any]:
        """Copies of values; what they are paired with is where they are, for errors."""
        if len(self._path) >= _DEEPEST:
            raise self._refused(f"is nested more than {_DEEPEST} deep, or contains itself")
        self._path.append(None)
        found = []
        for self._path[-1], value in pairs:
            found.append(self._value(value))
        self._path.pop()
        return found

    def _items(self, values: Collection[Any]) -> Any:
        kinds = set(map(type, values))
        if kinds <= _ATOMS:
            return list(values)
        if len(values) >= _ROW and len(kinds) == 1:
            if kinds == {float}:
                return self._row("floats", np.fromiter(values, "<f8", len(values)))
            if kinds == {int} and min(values) >= -_INT64 and max(values) < _INT64:
                return self._row("ints", np.fromiter(values, "<i8", len(values)))
        return self._each(enumerate(values))

    def _row(self, kind: str, row: np.ndarray[Any, Any]) -> Any:
        return _tag(kind, self._blob(row))

    def _tuple(self, value: tuple[Any, ...]) -> Any:
        return _tag("tuple", self._items(value))

    def _set(self, value: set[Any]) -> Any:
        return _tag("set", self._items(value))

    def _frozenset(self, value: frozenset[Any]) -> Any:
        return _tag("frozenset", self._items(value))

    def _deque(self, value: deque[Any]) -> Any:
        return _tag("deque", {"items": self._items(value), "maxlen": value.maxlen})

    def _range(self, value: range) -> Any:
        return _tag("range", self._items((value.start, value.stop, value.step)))

    def _dict(self, value: dict[Any, Any]) -> Any:
        if set(map(type, value)) <= {str} and MARK not in value:
            return dict(zip(value, self._each(value.items()), strict=True))
        return _tag("dict", self._pairs(value))

    def _pairs(self, value: Mapping[Any, Any]) -> list[Any]:
        keys = self._each((_Key(key), key) for key in value)
        return [list(pair) for pair in zip(keys, self._each(value.items()), strict=True)]

    def _counter(self, value: Counter[Any]) -> Any:
        return _tag("counter", self._pairs(value))

    def _ordered(self, value: OrderedDict[Any, Any]) -> Any:
        held: dict[str, Any] = {"items": self._pairs(value)}
        if hasattr(value, "_metadata"):  # a module's state dict: the versions of its modules
            held["metadata"] = self._value(value._metadata)
        return _tag("ordered", held)

    def _defaultdict(self, value: defaultdict[Any, Any]) -> Any:
        if value.default_factory not in FACTORIES.values():
            raise self._refused(
                f"is a defaultdict that makes its values with {value.default_factory!r}, which a "
                "checkpoint cannot hold: convert it in state_dict(), with dict(...)"
            )
        factory = getattr(value.default_factory, "__name__", "none")
        return _tag("defaultdict", {"items": self._pairs(value), "factory": factory})

    # -- bytes -------------------------------------------------------------------------------

    def _bytes(self, value: bytes) -> Any:
        return _tag("bytes", self._blob(value))

    # As an array, a text of numpy's would lose the zeros at its end.

    def _numpy_text(self, value: np.str_) -> Any:
        return _tag("numpy text", str.__str__(value))

    def _numpy_bytes(self, value: np.bytes_) -> Any:
        return _tag("numpy bytes", self._blob(bytes(value)))

    def _bytearray(self, value: bytearray) -> Any:
        return _tag("bytearray", self._blob(bytes(value) if self._copies else b""))

    def _tensor(self, value: Tensor) -> Any:
        if value.layout != torch.strided or value.is_meta or value.is_quantized or value.is_nested:
            raise self._refused(
                f"is a tensor that is {value.dtype}, {value.layout}, on {value.device}; a "
                "checkpoint holds dense ones that have values: convert it in state_dict()"
            )
        facts: dict[str, Any] = {
            "dtype": str(value.dtype).removeprefix("torch."),
            "shape": list(value.shape),
        }
        if type(value) is nn.Parameter:
            facts["parameter"] = True
        if value.requires_grad and value.is_leaf:
            facts["grad"] = True
        if self._keep is not None:
            return _tag("kept", {**facts, "at": self._keep(value, self._steps("."))})
        if not self._copies:
            return _tag("tensor", facts)
        copy = torch.empty(value.shape, dtype=value.dtype)
        copy.copy_(value.detach())  # in the order of its elements, from any device
        return _tag("tensor", self._blob(copy.reshape(-1).view(torch.uint8).numpy(), **facts))

    def _array(self, value: np.ndarray[Any, Any]) -> Any:
        return _tag("array", self._numpy(value))

    def _numpy(self, value: np.ndarray[Any, Any]) -> dict[str, Any]:
        kind = describe_dtype(value.dtype)
        if kind is None:
            raise self._refused(
                f"is a numpy value of dtype {value.dtype}, which a checkpoint cannot hold: convert "
                "it in state_dict(), to a list or to another dtype"
            )
        facts = {"dtype": kind, "shape": list(value.shape)}
        order: Any = "C"
        if value.flags.f_contiguous and not value.flags.c_contiguous:
            order = facts["order"] = "F"
        return self._blob(value.tobytes(order) if self._copies else b"", **facts)


def _tag(kind: str, value: Any) -> dict[str, Any]:
    return {MARK: kind, "v": value}


def _named(kind: str) -> Callable[[Copier, Any], Any]:
    """For what is known by its name alone."""
    return lambda _, value: _tag(kind, str(value).removeprefix("torch."))


def _path(_: Copier, value: PurePosixPath | PureWindowsPath) -> Any:
    return _tag("path", [type(value).__name__, str(value)])


_NOTHING = memoryview(b"")
FACTORIES: dict[str, Any] = {
    "none": None,
    **{kind.__name__: kind for kind in (bool, dict, float, int, list, set, str, tuple)},
}
"""What a defaultdict may make its values with, by name."""

# By the type itself: a subclass has more to it than would come back.
_KINDS: dict[type, Callable[[Copier, Any], Any]] = {
    int: Copier._int,
    float: Copier._float,
    complex: Copier._complex,
    list: Copier._items,
    tuple: Copier._tuple,
    set: Copier._set,
    frozenset: Copier._frozenset,
    deque: Copier._deque,
    range: Copier._range,
    dict: Copier._dict,
    Counter: Copier._counter,
    OrderedDict: Copier._ordered,
    defaultdict: Copier._defaultdict,
    bytes: Copier._bytes,
    bytearray: Copier._bytearray,
    Tensor: Copier._tensor,
    nn.Parameter: Copier._tensor,
    np.ndarray: Copier._array,
    np.str_: Copier._numpy_text,
    np.bytes_: Copier._numpy_bytes,
    torch.Size: lambda copier, value: _tag("size", copier._items(tuple(value))),
    torch.dtype: _named("dtype"),
    torch.device: _named("device"),
    PosixPath: _path,
    PurePosixPath: _path,
    PureWindowsPath: _path,
}
