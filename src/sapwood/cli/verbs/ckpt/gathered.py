"""A checkpoint's tensors and the rest of its state, as what ``torch.save`` would get."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sapwood.cli.verbs.ckpt.content import Content
from sapwood.state.catalog import Entry

__all__ = ["gather"]


def gather(
    content: Content,
    chosen: Sequence[Entry],
    advance: Callable[[int], None],
    *,
    with_optimizer: bool,
) -> dict[str, Any]:
    """The model's state dict; with the optimizer a dictionary of both and the step.

    Every byte is verified. Tied names share one tensor, as in a state dict.
    """
    model: dict[str, Any] = {}
    state: dict[str, dict[str, Any]] = {}
    tied = content.tied()
    read: dict[tuple[str, str], Any] = {}
    for entry in chosen:
        source = tied.get(entry.key, entry)
        if source.key not in read:
            read[source.key] = _tensor(content.read(source.key), source)
        tensor = read[source.key]
        if entry.file == "model":
            model[entry.name] = tensor
        else:
            owner, _, part = entry.name.rpartition("/")
            state.setdefault(owner, {})[part] = tensor
        advance(entry.nbytes)
    model |= _extra_state(content)
    return _with_optimizer(model, state, content) if with_optimizer else model


def _extra_state(content: Content) -> dict[str, Any]:
    """What modules keep beside tensors, as a state dict has it."""
    from sapwood.state.modules import EXTRA_STATE
    from sapwood.state.plain import from_plain

    saved = from_plain(content.extras().get("shared", {}).get(EXTRA_STATE, {}))
    return {f"{name}._extra_state".lstrip("."): value for name, value in saved.items()}


def _with_optimizer(
    model: dict[str, Any], state: dict[str, dict[str, Any]], content: Content
) -> dict[str, Any]:
    from sapwood.state.optimizers import COMMON
    from sapwood.state.plain import from_plain

    extras: Mapping[str, Any] = content.extras()
    plain = from_plain(extras.get("optimizer", {}))
    state.update(plain.pop(COMMON, {}))  # of no parameter: beside them, as in a state dict
    for owner, values in plain.items():
        state.setdefault(owner, {}).update(values)
    groups = from_plain(extras.get("groups", []))
    return {
        "model": model,
        "optimizer": {"state": state, "param_groups": groups},
        "step": content.record.id.step,
    }


def _tensor(raw: bytearray, entry: Entry) -> Any:
    import torch

    from sapwood.state.contents import to_torch_dtype

    dtype = to_torch_dtype(entry.dtype)
    if not raw:
        return torch.empty(entry.shape, dtype=dtype)
    return torch.frombuffer(raw, dtype=torch.uint8).view(dtype).view(entry.shape)
