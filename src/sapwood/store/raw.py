"""Tensors as raw bytes, and raw bytes as tensors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sapwood.buffers.fresh import fresh_memory
from sapwood.errors import StoreError
from sapwood.repository.base import NOTHING
from sapwood.repository.manifest import DTYPES, TensorRow

__all__ = ["bytes_of", "dtype_name", "empty", "tensor_in", "tensors_apart"]

_DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in DTYPES}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


def dtype_name(tensor: Tensor) -> str:
    """A tensor's dtype as manifests name it.

    Raises:
        StoreError: it is one that the repository cannot keep.
    """
    name = _NAMES.get(tensor.dtype)
    if name is None:
        raise StoreError(
            f"a tensor is {tensor.dtype}, which the repository cannot hold; it holds "
            f"{', '.join(DTYPES)}"
        )
    return name


def bytes_of(tensor: Tensor) -> memoryview:
    """Its elements in order, where they lie if they lie so in this machine's memory."""
    plain = tensor.detach()
    if plain.device.type != "cpu" or plain.is_conj() or plain.is_neg() or not plain.is_contiguous():
        plain = plain.resolve_conj().resolve_neg().cpu().contiguous()
    if not plain.numel():
        return memoryview(b"")
    # Not view(-1): a dimension of one element may have any stride.
    row = plain.as_strided((plain.numel(),), (1,))
    flat: npt.NDArray[np.uint8] = row.view(torch.uint8).numpy()
    return flat.data


def empty(row: TensorRow) -> Tensor:
    """A tensor of its own memory, whose values are not set."""
    return tensor_in(fresh_memory(row.nbytes), row)


def tensor_in(memory: Any, row: TensorRow) -> Tensor:
    """The tensor whose bytes these are; it shares the memory and keeps it alive."""
    dtype = _DTYPES[row.dtype]
    if not row.nbytes:
        return torch.empty(row.shape, dtype=dtype)
    flat = torch.from_numpy(np.frombuffer(memory, np.uint8))
    return flat.view(dtype).reshape(row.shape)


def tensors_apart(rows: Iterable[TensorRow], mapped: Mapping[int, memoryview]) -> dict[int, Tensor]:
    """Tensors in mapped memory of blobs, by number; none shares memory with another one.

    Equal tensors are one blob, or several at one place. Only ties share memory, and those have one
    number: to write to one of two tensors that are merely equal must not change the other.
    """
    found: dict[int, Tensor] = {}
    taken: set[int] = set()
    for row in rows:
        if row.blob == NOTHING:
            found[row.number] = empty(row)
            continue
        tensor = tensor_in(mapped[row.blob], row)
        # Nothing was written to the memory yet, so that its first tensor is as good as the blob.
        if tensor.data_ptr() in taken:
            copy = empty(row)
            bytes_of(copy)[:] = mapped[row.blob]
            found[row.number] = copy
            continue
        found[row.number] = tensor
        taken.add(tensor.data_ptr())
    return found
