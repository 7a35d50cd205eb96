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


def dtype_name(tensor: Tensor) -> str:
    """A tensor's dtype as manifests name it.

    Raises:
        StoreError: it is one that the repository cannot keep.
    """
    name = str(tensor.dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise StoreError(
            f"a tensor is {tensor.dtype}, which the repository cannot hold; it holds "
            f"{', '.join(DTYPES)}"
        )
    return name


def bytes_of(tensor: Tensor) -> memoryview:
    """Its elements in order, where they lie if they lie so in this machine's memory."""
    plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    if not plain.numel():
        return memoryview(b"")
    flat: npt.NDArray[np.uint8] = plain.reshape(-1).view(torch.uint8).numpy()
    return flat.data


def empty(row: TensorRow) -> Tensor:
    """A tensor of its own memory, whose values are not set."""
    return tensor_in(fresh_memory(row.nbytes), row)


def tensor_in(memory: Any, row: TensorRow) -> Tensor:
    """The tensor whose bytes these are; it shares the memory and keeps it alive."""
    dtype = getattr(torch, row.dtype)
    if not row.nbytes:
        return torch.empty(row.shape, dtype=dtype)
    flat = torch.from_numpy(np.frombuffer(memory, np.uint8))
    return flat.view(dtype).reshape(row.shape)
