"""What differs between two versions, tensor by tensor."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sapwood.repository.manifest import TensorRow
from sapwood.store.stored import StoredModel

__all__ = ["Change", "compare", "compare_files"]


_FOUR_BITS = torch.tensor(
    [sign * value for sign in (1.0, -1.0) for value in (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)],
    dtype=torch.float64,
)
"""What each four bits of ``float4_e2m1fn_x2`` mean."""


@dataclass(frozen=True, kw_only=True)
class Change:
    """How one tensor differs."""

    name: str
    kind: str
    """``same``, ``changed``, ``reshaped`` (another shape or dtype), ``added`` or ``removed``."""
    before: TensorRow | None
    after: TensorRow | None
    largest: float = 0.0
    """The largest difference of two elements."""
    relative: float = 0.0
    """The norm of the difference, divided by that of the tensor before."""


def compare(before: StoredModel, after: StoredModel) -> list[Change]:
    """Every tensor of either, in the order of the later version, then what was removed.

    Tensors that share their bytes are not read.
    """
    names = [*after, *(name for name in before if name not in after)]
    return [_change(name, before, after) for name in names]


def compare_files(before: StoredModel, after: StoredModel) -> dict[str, str]:
    """The files kept with either: ``same``, ``changed``, ``added`` or ``removed``, by name."""
    names = sorted({*before.files, *after.files})
    return {name: _kind_of_file(name, before, after) for name in names}


def _kind_of_file(name: str, before: StoredModel, after: StoredModel) -> str:
    if name not in before.files:
        return "added"
    if name not in after.files:
        return "removed"
    old, new = before.file_row(name), after.file_row(name)
    if old.nbytes != new.nbytes:
        return "changed"
    same = old.blob == new.blob or before.file(name) == after.file(name)
    return "same" if same else "changed"


def _change(name: str, before: StoredModel, after: StoredModel) -> Change:
    old, new = before.row(name), after.row(name)
    if old is None or new is None:
        kind = "added" if old is None else "removed"
        return Change(name=name, kind=kind, before=old, after=new)
    if (old.dtype, old.shape) != (new.dtype, new.shape):
        return Change(name=name, kind="reshaped", before=old, after=new)
    if old.blob == new.blob:
        return Change(name=name, kind="same", before=old, after=new)
    one, other = before[name].load(), after[name].load()
    if torch.equal(_bits(one), _bits(other)):
        return Change(name=name, kind="same", before=old, after=new)
    largest, relative = _distance(one, other)
    return Change(
        name=name, kind="changed", before=old, after=new, largest=largest, relative=relative
    )


def _bits(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def _distance(one: Tensor, other: Tensor) -> tuple[float, float]:
    a, b = _wide(one), _wide(other)
    difference = (b - a).abs()
    norm = float(torch.linalg.vector_norm(a))
    distance = float(torch.linalg.vector_norm(difference))
    return float(difference.max()), distance / norm if norm else float("inf")


def _wide(tensor: Tensor) -> Tensor:
    """The elements as numbers that can be subtracted."""
    if tensor.dtype == torch.float4_e2m1fn_x2:  # torch has the dtype, and converts it to no other
        pairs = _bits(tensor).to(torch.int64)
        return _FOUR_BITS[torch.stack((pairs & 15, pairs >> 4))].reshape(-1)
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)
