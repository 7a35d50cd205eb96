"""numpy's dtypes as JSON: with their byte order, their units, and the fields of structured ones."""

from __future__ import annotations

from typing import Any

import numpy as np

__all__ = ["describe_dtype", "read_dtype"]

_KINDS = frozenset("biufcSUMmV")
_Dtype = np.dtype[Any]


def describe_dtype(dtype: _Dtype) -> Any:
    """The JSON form of a dtype; None if arrays of it are not plain bytes, or it would differ."""
    if dtype.hasobject or dtype.kind not in _KINDS:
        return None
    described = _described(dtype)
    try:
        # A type of another package has numpy's word for unknown bytes, and titles are lost.
        return described if read_dtype(described) == dtype else None
    except (TypeError, ValueError):
        return None


def _described(dtype: _Dtype) -> Any:
    if dtype.subdtype is not None:
        base, shape = dtype.subdtype
        return {"of": _described(base), "shape": list(shape)}
    if dtype.names is None:
        return dtype.str
    fields = [dtype.fields[name] for name in dtype.names] if dtype.fields else []
    return {
        "names": list(dtype.names),
        "formats": [_described(field[0]) for field in fields],
        "offsets": [field[1] for field in fields],
        "itemsize": dtype.itemsize,
        "aligned": dtype.isalignedstruct,
    }


def read_dtype(described: Any) -> _Dtype:
    """The reverse of ``describe_dtype``.

    Raises:
        TypeError, ValueError, KeyError: it is no dtype.
    """
    if isinstance(described, str):
        dtype = np.dtype(described)
        if dtype.kind not in _KINDS:  # never objects: their bytes are addresses
            raise TypeError(f"{described!r} is no dtype of plain bytes")
        return dtype
    if "of" in described:
        return np.dtype((read_dtype(described["of"]), tuple(described["shape"])))
    fields: Any = {
        "names": described["names"],
        "formats": [read_dtype(one) for one in described["formats"]],
        "offsets": described["offsets"],
        "itemsize": described["itemsize"],
    }
    found: _Dtype = np.dtype(fields, align=bool(described["aligned"]))
    return found
