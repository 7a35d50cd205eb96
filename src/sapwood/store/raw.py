"""Tensors as raw bytes, and raw bytes as tensors."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sapwood.buffers.fresh import fresh_memory
from sapwood.errors import StoreError
from sapwood.repository.manifest import DTYPES, TensorRow

__all__ = ["bytes_of", "dtype_name", "empty", "tensor_in"]

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
    flat: npt.NDArray[np.uint8] = plain.view(-1).view(torch.uint8).numpy()
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
