"""The tensors of a run as a checkpoint sees them, and noticing that they are others now."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from sapwood.errors import CheckpointError
from sapwood.state.catalog import Catalog, Entry
from sapwood.state.optimizers import is_named, optimizer_tensors, plain_state
from sapwood.state.tensors import (
    clean_name,
    named_buffers,
    named_parameters,
    other_names,
    unwrap,
)

__all__ = [
    "Contents",
    "byte_view",
    "collect",
    "holders_among",
    "ordered_bytes",
    "to_torch_dtype",
]

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
    tied: Mapping[str, str]
    """Further names of the model's tensors, which a state dict has too, and the name used here."""
    parameters: Mapping[str, nn.Parameter]
    """The model's, by name."""
    _optimizer: torch.optim.Optimizer
    _watch: _Watch

    def plain(self) -> dict[str, dict[Any, Any]]:
        """The rest of the optimizer's state as it is now, see ``plain_state``."""
        return plain_state(self.parameters, self._optimizer)

    def current(self) -> bool:
        """Whether the run still has these very tensors, in this very memory; cheap."""
        return self._watch.unchanged()

    def replaced(self, now: Contents) -> list[Key]:
        """Which tensors of parameters and the optimizer lie elsewhere now; catalogs are alike."""
        owned = (key for keys in self.by_parameter.values() for key in keys)
        return [k for k in owned if self.tensors[k].data_ptr() != now.tensors[k].data_ptr()]


def collect(model: nn.Module, optimizer: torch.optim.Optimizer, holders: Holders) -> Contents:
    """Look at a run; ``holders`` says which ranks hold the tensor of a name.

    Raises:
        CheckpointError: a tensor is of a kind that cannot be saved.
    """
    tensors: dict[Key, Tensor] = {}
    by_parameter: dict[str, tuple[Key, ...]] = {}
    entries = []
    originals: list[Tensor] = []  # a detached one keeps the old memory when ``.data`` is set

    def add(file: str, name: str, owner: str, tensor: Tensor) -> Key:
        entries.append(_entry(file, name, tensor, holders(owner)))
        tensors[file, name] = tensor.detach()
        originals.append(tensor)
        return file, name

    parameters = named_parameters(model)
    for name, parameter in parameters.items():
        keys = [add("model", name, name, parameter)]
        state = optimizer_tensors(optimizer, parameter)
        keys += [add("optimizer", f"{name}/{k}", name, v) for k, v in sorted(state.items())]
        by_parameter[name] = tuple(keys)
    buffers = _kept_buffers(model)
    for name, buffer in buffers.items():
        add("model", name, name, buffer)
    watch = _Watch(model, optimizer, originals, list(buffers.values()))
    passing = _passing_names(model)
    tied = {
        name: known
        for name, known in other_names(model).items()
        if ("model", known) in tensors and ("model", name) not in tensors and name not in passing
    }
    catalog = Catalog(tuple(entries))
    return Contents(catalog, tensors, by_parameter, tied, parameters, optimizer, watch)


def holders_among(ranks: tuple[int, ...], model: nn.Module, *, shares_buffers: bool) -> Holders:
    """Which of these ranks hold a tensor: all; but buffers that differ are those of the first.

    A byte from here and a byte from there would be the buffers of no rank.
    """
    if shares_buffers:
        return lambda name: ranks
    buffers = frozenset(named_buffers(model))
    return lambda name: ranks[:1] if name in buffers else ranks


def _kept_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Buffers that belong to a state dict, by the first name that makes them so.

    The others are made anew with the model.
    """
    found: dict[int, tuple[str, Tensor]] = {}
    for prefix, module in unwrap(model).named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                found.setdefault(id(buffer), (clean_name(f"{prefix}.{name}".lstrip(".")), buffer))
    kept = dict(found.values())
    # In the order of all buffers, which catalogs have had from the start.
    order = {id(buffer): n for n, buffer in enumerate(named_buffers(model).values())}
    return dict(sorted(kept.items(), key=lambda item: order[id(item[1])]))


def _passing_names(model: nn.Module) -> set[str]:
    """The names under which a buffer does not belong to a state dict."""
    return {
        clean_name(f"{prefix}.{name}".lstrip("."))
        for prefix, module in unwrap(model).named_modules()
        for name in module._non_persistent_buffers_set
    }


def _entry(file: str, name: str, tensor: Tensor, holders: tuple[int, ...]) -> Entry:
    if name == "__metadata__":
        raise CheckpointError(
            f"{file} {name} cannot be saved: in a safetensors file this name is not a tensor's; "
            "use another"
        )
    dtype = _DTYPES.get(tensor.dtype)
    if dtype is None or tensor.layout != torch.strided or tensor.is_meta:
        kind = "has no values (it is on the meta device)" if tensor.is_meta else "cannot be saved"
        advice = "convert it"
        if file == "model":
            advice += ", or register it as a buffer with persistent=False"
        raise CheckpointError(
            f"{file} {name} is {str(tensor.dtype).removeprefix('torch.')}, {tensor.layout}, and "
            f"{kind}; {advice}"
        )
    return Entry(file=file, name=name, dtype=dtype, shape=tuple(tensor.shape), holders=holders)


def to_torch_dtype(name: str) -> torch.dtype:
    """The torch dtype behind safetensors' name."""
    return next(dtype for dtype, known in _DTYPES.items() if known == name)


def byte_view(tensor: Tensor) -> Tensor | None:
    """The tensor's own memory as bytes in the order of its elements; None if it is not that."""
    if not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
        return None
    # Not reshape(-1): a dimension of one element may have any stride.
    row = tensor.detach().as_strided((tensor.numel(),), (1,), tensor.storage_offset())
    return row.view(torch.uint8)


def ordered_bytes(tensor: Tensor) -> Tensor:
    """The tensor's bytes in the order of its elements: its own memory if possible, else a copy."""
    view = byte_view(tensor)
    if view is None:
        view = byte_view(tensor.detach().resolve_conj().resolve_neg().contiguous())
        assert view is not None
    return view


class _Watch:
    """Notices replaced, added and removed tensors, and tensors that moved to other memory.

    Walking the model for every save would cost more than the save; comparing identities does not.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        tensors: list[Tensor],
        buffers: list[Tensor],
    ) -> None:
        self._containers = [(c, tuple(c.values())) for c in _containers(model)]
        self._optimizer = optimizer
        self._states = _states(optimizer)
        self._tensors = tensors
        self._pointers = _pointers(tensors)
        self._buffers = buffers
        self._forms = _forms(buffers)

    def unchanged(self) -> bool:
        for container, known in self._containers:
            if not _same(container.values(), known):
                return False
        # Asked anew: ``load_state_dict`` puts another dictionary in its place, and so may users.
        if not _same(_states(self._optimizer), self._states):
            return False
        if _forms(self._buffers) != self._forms:
            return False
        return _pointers(self._tensors) == self._pointers


def _same(now: Collection[object], known: Collection[object]) -> bool:
    return len(now) == len(known) and all(map(operator.is_, now, known))


def _containers(model: nn.Module) -> Iterator[Mapping[str, object]]:
    for module in unwrap(model).modules():
        yield module._parameters
        yield module._buffers
        yield module._modules


def _states(optimizer: torch.optim.Optimizer) -> list[object]:
    """The optimizer's tensors, behind the parameters they are of.

    What is no tensor may be another object in each step, and is looked at whenever it is saved.
    """
    found: list[object] = []
    for parameter, state in optimizer.state.items():
        if isinstance(parameter, Tensor):
            found.append(parameter)
            found += [value for key, value in state.items() if is_named(key, value)]
    return found


def _pointers(tensors: list[Tensor]) -> list[int]:
    return [tensor.data_ptr() for tensor in tensors]


def _forms(buffers: list[Tensor]) -> list[object]:
    """How buffers lie; ``resize_`` and ``.data`` may change it, and the memory stays.

    Of parameters, the engine sees to it in every step.
    """
    return [(b.shape, b.stride(), b.dtype) for b in buffers]
