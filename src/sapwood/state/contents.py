"""The tensors of a run as a checkpoint sees them, and noticing that they are others now."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from sapwood.errors import CheckpointError
from sapwood.state.catalog import Catalog, Entry
from sapwood.state.tensors import (
    named_buffers,
    named_parameters,
    optimizer_tensors,
    other_names,
    unwrap,
)

__all__ = ["Contents", "byte_view", "collect", "to_torch_dtype"]

Key = tuple[str, str]
Holders = Callable[[str], tuple[int, ...]]

_DTYPES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.int16: "I16",
    torch.uint16: "U16",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int32: "I32",
    torch.uint32: "U32",
    torch.float32: "F32",
    torch.complex64: "C64",
    torch.float64: "F64",
    torch.int64: "I64",
    torch.uint64: "U64",
}


@dataclass(frozen=True)
class Contents:
    """A run's tensors by file and name, as they were when ``collect`` looked."""

    catalog: Catalog
    tensors: Mapping[Key, Tensor]
    by_parameter: Mapping[str, tuple[Key, ...]]
    """The keys that change when a parameter is updated: its own and its optimizer state's."""
    plain: Mapping[str, Mapping[str, Any]]
    """Optimizer state that is not tensors, by parameter."""
    tied: Mapping[str, str]
    """Further names of the model's tensors, which a state dict has too, and the name used here."""
    _watch: _Watch

    def current(self) -> bool:
        """Whether the run still has these very tensors, in this very memory; cheap."""
        return self._watch.unchanged()


def collect(model: nn.Module, optimizer: torch.optim.Optimizer, holders: Holders) -> Contents:
    """Look at a run; ``holders`` says which ranks hold the tensor of a name.

    Raises:
        CheckpointError: a tensor is of a kind that cannot be saved.
    """
    tensors: dict[Key, Tensor] = {}
    by_parameter: dict[str, tuple[Key, ...]] = {}
    plain: dict[str, dict[str, Any]] = {}
    entries = []

    def add(file: str, name: str, owner: str, tensor: Tensor) -> Key:
        entries.append(_entry(file, name, tensor, holders(owner)))
        tensors[file, name] = tensor.detach()
        return file, name

    for name, parameter in named_parameters(model).items():
        keys = [add("model", name, name, parameter)]
        state = optimizer_tensors(optimizer, parameter)
        keys += [add("optimizer", f"{name}/{k}", name, v) for k, v in sorted(state.items())]
        by_parameter[name] = tuple(keys)
        rest = {k: v for k, v in optimizer.state.get(parameter, {}).items() if k not in state}
        if rest:
            plain[name] = rest
    for name, buffer in _kept_buffers(model).items():
        add("model", name, name, buffer)
    watch = _Watch(model, optimizer, list(tensors.values()))
    tied = {n: known for n, known in other_names(model).items() if ("model", known) in tensors}
    return Contents(Catalog(tuple(entries)), tensors, by_parameter, plain, tied, watch)


def _kept_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Buffers that belong to a state dict; the others are made anew with the model."""
    left_out = {
        id(module._buffers[name])
        for module in unwrap(model).modules()
        for name in module._non_persistent_buffers_set
    }
    return {name: b for name, b in named_buffers(model).items() if id(b) not in left_out}


def _entry(file: str, name: str, tensor: Tensor, holders: tuple[int, ...]) -> Entry:
    dtype = _DTYPES.get(tensor.dtype)
    if dtype is None or tensor.layout != torch.strided or tensor.is_meta:
        kind = "has no values (it is on the meta device)" if tensor.is_meta else "cannot be saved"
        raise CheckpointError(
            f"{file} {name} is {str(tensor.dtype).removeprefix('torch.')}, {tensor.layout}, and "
            f"{kind}; convert it, or register it as a buffer with persistent=False"
        )
    return Entry(file=file, name=name, dtype=dtype, shape=tuple(tensor.shape), holders=holders)


def to_torch_dtype(name: str) -> torch.dtype:
    """The torch dtype behind safetensors' name."""
    return next(dtype for dtype, known in _DTYPES.items() if known == name)


def byte_view(tensor: Tensor) -> Tensor | None:
    """The tensor's own memory as bytes in the order of its elements; None if it is not in order."""
    if not tensor.is_contiguous():
        return None
    return tensor.detach().reshape(-1).view(torch.uint8)


class _Watch:
    """Notices replaced, added and removed tensors, and tensors that moved to other memory.

    Walking the model for every save would cost more than the save; comparing identities does not.
    """

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, tensors: list[Tensor]
    ) -> None:
        self._containers = [(c, tuple(c.values())) for c in _containers(model, optimizer)]
        self._state = optimizer.state
        self._state_size = len(optimizer.state)
        self._tensors = tensors
        self._pointers = _pointers(tensors)

    def unchanged(self) -> bool:
        if len(self._state) != self._state_size:
            return False
        for container, known in self._containers:
            if len(container) != len(known) or not all(
                map(operator.is_, container.values(), known)
            ):
                return False
        return _pointers(self._tensors) == self._pointers


def _containers(
    model: nn.Module, optimizer: torch.optim.Optimizer
) -> Iterator[Mapping[str, object]]:
    for module in unwrap(model).modules():
        yield module._parameters
        yield module._buffers
        yield module._modules
    for parameter in named_parameters(model).values():
        if parameter in optimizer.state:
            yield optimizer.state[parameter]


def _pointers(tensors: list[Tensor]) -> list[int]:
    return [tensor.data_ptr() for tensor in tensors]
