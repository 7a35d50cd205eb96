"""Taking a value apart into named tensors and the structure around them, and back.

The structure is JSON (``state.plain``), in which each tensor is a number. Tensors that are the same
memory, as tied weights are, get one number and keep all their names.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from sapwood.errors import CheckpointError, Damaged, StoreError
from sapwood.repository.manifest import Manifest, text_of
from sapwood.state.copier import Copier
from sapwood.state.packed import MARK
from sapwood.state.plain import from_plain
from sapwood.state.tensors import clean_name, unwrap

__all__ = ["Parts", "entries", "other_entries", "put_together", "take_apart"]


@dataclass(frozen=True)
class Parts:
    """A value taken apart."""

    tensors: tuple[Tensor, ...]
    """Each piece of memory once."""
    names: tuple[tuple[str, int], ...]
    """Every name, with the number of its tensor; names are unique."""
    structure: Any
    """JSON, in which tensors are numbers."""
    text: bytes
    """The same as text."""


def take_apart(value: Any) -> Parts:
    """The tensors of a module, of a state dict, or of nested values.

    Raises:
        StoreError: something in it could not be given back as it is.
    """
    names: dict[str, int] = {}
    numbers: dict[Any, int] = {}
    tensors: list[Tensor] = []

    def keep(tensor: Tensor, path: str) -> int:
        number = numbers.setdefault(_identity(tensor), len(tensors))
        if number == len(tensors):
            tensors.append(tensor.detach())
        if not path.isprintable():
            raise StoreError(f"the name of tensor {path!r} has characters that cannot be printed")
        names[_unused(path or "value", names)] = number
        return number

    copier = Copier(keep=keep)
    try:
        whole = state_of(value) if isinstance(value, nn.Module) else value
        structure = copier.take(whole, "the value")
    except CheckpointError as error:
        raise StoreError(str(error).replace("a checkpoint", "the repository")) from error
    for blob in copier.blobs:
        blob.inline()
    return Parts(tuple(tensors), tuple(names.items()), structure, text_of(structure))


def state_of(model: nn.Module) -> OrderedDict[str, Any]:
    """A module's state dict, without the prefixes of DistributedDataParallel and torch.compile."""
    state: dict[str, Any] = unwrap(model).state_dict()
    found = OrderedDict((clean_name(name), value) for name, value in state.items())
    metadata: Mapping[str, Any] = getattr(state, "_metadata", {})
    versions = {clean_name(name): dict(facts) for name, facts in metadata.items()}
    found._metadata = versions  # type: ignore[attr-defined]
    return found


def put_together(structure: Any, tensor: Callable[[int], Tensor]) -> Any:
    """The value; ``tensor`` gives each tensor by its number, and is asked once for each.

    Raises:
        Damaged: the structure is not one that ``take_apart`` makes.
    """
    made: dict[int, Tensor] = {}

    def place(facts: Any) -> Tensor:
        number = facts["at"]
        if number not in made:
            found = tensor(number)
            if facts.get("parameter"):
                found = nn.Parameter(found, requires_grad=bool(facts.get("grad")))
            elif facts.get("grad"):
                found = found.requires_grad_()
            made[number] = found
        return made[number]

    try:
        return from_plain(_placed(structure, place))
    except CheckpointError as error:
        raise Damaged(str(error)) from error
    except (KeyError, TypeError, IndexError, RecursionError) as error:
        raise Damaged(f"the structure of a stored model is damaged: {error}") from error


def other_entries(manifest: Manifest) -> list[str]:
    """The entries of a state dict that are no tensors, such as a module's extra state."""
    whole = put_together(manifest.structure, lambda _: torch.empty(0))
    if not isinstance(whole, Mapping):
        return []
    return [str(key) for key, value in whole.items() if not isinstance(value, Tensor)]


def entries(
    manifest: Manifest, keys: Sequence[str], tensors: Mapping[int, Tensor]
) -> dict[str, Any]:
    """Those entries; tensors that are not given stand for themselves, empty."""
    whole = put_together(manifest.structure, lambda n: tensors.get(n, torch.empty(0)))
    return {str(key): value for key, value in whole.items() if str(key) in keys}


def _placed(value: Any, place: Callable[[Any], Tensor]) -> Any:
    if isinstance(value, list):
        return [_placed(v, place) for v in value]
    if not isinstance(value, dict):
        return value
    if value.get(MARK) == "kept":
        return place(value["v"])
    return {key: _placed(v, place) for key, v in value.items()}


def _identity(tensor: Tensor) -> Any:
    """Equal for names of the same elements in the same memory; other views are other tensors."""
    if tensor.layout != torch.strided or not tensor.numel() or tensor.is_meta:
        return id(tensor)
    where = (tensor.device, tensor.data_ptr(), tensor.dtype)
    return (*where, tuple(tensor.shape), tensor.stride(), tensor.is_conj(), tensor.is_neg())


def _unused(name: str, taken: Mapping[str, int]) -> str:
    """Keys such as 1 and "1", or "a.b" and "a" above "b", make one name of two tensors."""
    count, found = 1, name
    while found in taken:
        count += 1
        found = f"{name}~{count}"
    return found
