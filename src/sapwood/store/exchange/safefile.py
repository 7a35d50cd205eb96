"""Reading .safetensors files: their tensors are mapped, and nothing is decoded or copied."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from sapwood.errors import Damaged, StoreError
from sapwood.regular import open_regular
from sapwood.repository.manifest import TensorRow
from sapwood.state.safetensors import MODEL_NAMES, FilePart, read_header
from sapwood.store.raw import tensor_in

__all__ = ["SafeContent", "map_file", "read_safetensors", "torch_shape"]


@dataclass(frozen=True)
class SafeContent:
    """What is in a file."""

    tensors: OrderedDict[str, Tensor]
    """Names that the file says are tied are the same tensor."""
    metadata: dict[str, str]
    """Without the format where that is torch's, as it is nearly everywhere."""


def read_safetensors(path: Path) -> SafeContent:
    """The tensors and the metadata of a file.

    Raises:
        Damaged: it is not sound, or has a dtype that torch has not.
        StoreError: it cannot be read.
    """
    try:
        header = read_header(path, MODEL_NAMES)
        whole = map_file(path)
        # A file that was replaced or cut since its header was read has another size.
        if header.parts and header.parts[-1].start + header.parts[-1].nbytes != len(whole):
            raise ValueError("it changed while it was read")
        tensors = OrderedDict((part.name, _tensor(whole, part)) for part in header.parts)
    except ValueError as error:
        raise Damaged(f"{path}: not a sound .safetensors file: {error}") from error
    except OSError as error:
        raise StoreError(f"cannot read {path}: {error.strerror or error}") from error
    metadata = {k: v for k, v in header.metadata.items() if (k, v) != ("format", "pt")}
    for name, stands_for in metadata.items():
        if name not in tensors and stands_for in tensors:  # as safetensors.torch.save_model does
            tensors[name] = tensors[stands_for]
    return SafeContent(tensors, metadata)


def map_file(path: Path) -> memoryview:
    """The bytes of a regular file, mapped; what is written to them never reaches it.

    Raises:
        OSError: it cannot be opened.
    """
    with os.fdopen(open_regular(path), "rb") as file:
        if not os.fstat(file.fileno()).st_size:
            return memoryview(b"")
        whole: np.memmap[Any, np.dtype[np.uint8]] = np.memmap(file, np.uint8, "c")
    return memoryview(whole.data).cast("B")


def torch_shape(dtype: str, shape: Sequence[int]) -> tuple[int, ...]:
    """The shape that torch gives a tensor of this dtype and shape of the file.

    Raises:
        ValueError: torch cannot hold it.
    """
    if dtype != "F4":
        return tuple(shape)
    if not shape or shape[-1] % 2:
        raise ValueError(f"a tensor of F4 has the shape {list(shape)}, and torch holds pairs")
    return (*shape[:-1], shape[-1] // 2)


def _tensor(whole: memoryview, part: FilePart) -> Tensor:
    shape = torch_shape(part.dtype, part.shape)
    row = TensorRow(0, MODEL_NAMES[part.dtype], shape, part.nbytes, 0)
    return tensor_in(whole[part.start : part.start + part.nbytes], row)
