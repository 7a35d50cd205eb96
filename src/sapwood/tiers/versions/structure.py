"""What a version gives back when it is loaded: the model's state dict, written without torch.

It is the JSON that ``sapwood.store`` writes for a state dict: tensors are numbers in it, tied
weights have the same number under each of their names, and the extra state of modules is there.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from sapwood.errors import CheckpointError, TierError
from sapwood.state.catalog import Catalog
from sapwood.state.packed import EXTRA_STATE, MARK, unpack
from sapwood.state.safetensors import TORCH_NAMES
from sapwood.tiers.versions.index import Key

__all__ = ["MODEL", "names_of", "structure_of_model"]

MODEL = "model"
"""The file of a catalog whose tensors are the model's."""


def names_of(
    catalog: Catalog, tensors: Mapping[Key, int], tied: Mapping[str, str]
) -> tuple[tuple[str, int], ...]:
    """The model's names with their tensors; ``tied`` are further names of some.

    Raises:
        TierError: a name cannot be one of a model in a repository.
    """
    found = {name: number for (file, name), number in tensors.items() if file == MODEL}
    known = {entry.name for entry in catalog.entries if entry.file == MODEL}
    for other, name in tied.items():
        if name in known and other not in known:
            found[other] = tensors[MODEL, name]
    odd = next((name for name in found if not name.isprintable()), None)
    if odd is not None:
        raise TierError(
            f"the tensor {odd!r} cannot be in a model repository: its name has characters that "
            "cannot be printed; rename the module"
        )
    return tuple(found.items())


def structure_of_model(
    catalog: Catalog,
    names: Sequence[tuple[str, int]],
    tensors: Mapping[Key, int],
    extras: Mapping[str, Any],
    region: Any,
) -> dict[str, Any]:
    """The state dict as JSON; ``extras`` and their ``region`` are those of rank 0."""
    entries = {tensors[entry.key]: entry for entry in catalog.entries}
    items: list[list[Any]] = []
    for name, number in names:
        entry = entries[number]
        facts = {"dtype": TORCH_NAMES[entry.dtype], "shape": list(entry.shape), "at": number}
        items.append([name, {MARK: "kept", "v": facts}])
    items += [[name, value] for name, value in _extra_state(extras, region)]
    return {MARK: "ordered", "v": {"items": items}}


def _extra_state(extras: Mapping[str, Any], region: Any) -> Iterator[tuple[str, Any]]:
    """What modules keep beside tensors, under the names a state dict has for it."""
    shared = extras.get("shared", {})
    if EXTRA_STATE not in shared:
        return
    saved = unpack({"shared": {EXTRA_STATE: shared[EXTRA_STATE]}}, region)["shared"][EXTRA_STATE]
    if not isinstance(saved, dict) or MARK in saved:
        raise CheckpointError("the extra state of modules is not what a checkpoint has of it")
    for module, value in saved.items():
        yield f"{module}._extra_state".lstrip("."), _inlined(value)


def _inlined(value: Any) -> Any:
    """The same with its bytes as text: a manifest has no region beside it."""
    if isinstance(value, (bytes, memoryview)):
        return base64.b64encode(value).decode()
    if isinstance(value, list):
        return [_inlined(one) for one in value]
    if isinstance(value, dict):
        return {key: _inlined(one) for key, one in value.items()}
    return value
