"""Buffers that forward changes: rank 0's values for everybody, and an event when they are final."""

from __future__ import annotations

import json
import logging
import math
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from sapwood.events import BuffersUpdated
from sapwood.state.tensors import clean_name, unwrap, writable
from sapwood.sync.base import Context

__all__ = ["BufferSync"]

log = logging.getLogger(__name__)

_ALIGNED = 16  # bytes: the widest element there is
_Entry = list[Any]
"""Name, shape and dtype of a buffer, as JSON has them."""


class BufferSync:
    """Broadcasts rank 0's buffers as one message of bytes, when a step ends.

    Not sooner: back-propagation may need the old ones, a recomputed segment changes BatchNorm
    statistics once more, and what the user changes before ``run.step()`` belongs to the step.
    Which buffers travel, and how large the message is, says rank 0: others may lack a buffer that
    is made in forward, or have one whose shape depends on their batch.
    """

    def __init__(self, context: Context, *, local: bool = False) -> None:
        """``local``: only announce; somebody else sees to it that ranks agree."""
        self._context = context
        self._owners = _Owners(unwrap(context.model))
        self._message = _Message([], context.group.device)
        self._shared = context.group.world > 1 and context.settings.broadcast_buffers and not local
        self._agreed: list[tuple[str, torch.Size, torch.dtype]] = []
        self._said: set[str] = set()

    def outdated(self) -> bool:
        """Whether rank 0 has other buffers than were agreed on; on other ranks always False."""
        if not self._shared or self._context.group.rank != 0:
            return False
        return _kinds(self._owners.tensors()) != self._agreed

    def finish(self, step: int, *, agree: bool) -> None:
        """Give every rank the values of rank 0, and announce them.

        Args:
            step: the step that ends.
            agree: rank 0's buffers were ``outdated`` in this step; the same on all ranks.
        """
        group = self._context.group
        wanted = self._context.events.wants(BuffersUpdated)
        if agree:
            self._agreed = _kinds(self._owners.tensors())
            form = json.dumps(_form(self._agreed))
            self._message = _Message(json.loads(group.share_text("buffers", form)), group.device)
        if not self._message.form and not wanted:
            return
        buffers = self._owners.tensors()
        if self._message.form:
            if group.rank == 0:
                self._message.write(buffers)
            group.broadcast(self._message.memory, "sending rank 0's buffers").wait()
            if group.rank != 0:
                self._say_odd(self._message.read(buffers))
        if buffers and wanted:
            self._context.events.publish(BuffersUpdated(step=step, buffers=buffers))

    def _say_odd(self, odd: dict[str, str]) -> None:
        new = [text for name, text in odd.items() if name not in self._said]
        self._said.update(odd)
        if new:
            log.warning(
                "not taken over from rank 0, because they differ in shape or dtype: %s",
                "; ".join(new[:3]),
            )


class _Owners:
    """The modules that have buffers. Asked for the tensors in each step: modules rebind them."""

    def __init__(self, model: nn.Module) -> None:
        self._modules = list(model.named_modules())
        self._counts: list[int] = []
        self._places: list[tuple[str, nn.Module, str]] = []

    def tensors(self) -> dict[str, Tensor]:
        """Every buffer once, by its name."""
        counts = [len(module._buffers) for _, module in self._modules]
        if counts != self._counts:  # a module has registered a new one
            self._counts = counts
            self._places = [
                (clean_name(f"{prefix}.{name}" if prefix else name), module, name)
                for prefix, module in self._modules
                for name in module._buffers
            ]
        found: dict[str, Tensor] = {}
        seen: set[int] = set()
        for full, module, name in self._places:
            buffer = module._buffers.get(name)
            if buffer is not None and id(buffer) not in seen:
                seen.add(id(buffer))
                found[full] = buffer
        return found


class _Message:
    """One piece of memory with a place for each buffer of a form, in which it keeps its dtype."""

    def __init__(self, form: list[_Entry], device: torch.device) -> None:
        self.form = form
        kinds = [getattr(torch, dtype) for _, _, dtype in form]
        sizes = [
            math.prod(shape) * kind.itemsize
            for (_, shape, _), kind in zip(form, kinds, strict=True)
        ]
        padded = (-(-size // _ALIGNED) * _ALIGNED for size in (len(form), *sizes))
        ends = list(accumulate(padded))
        self.memory = torch.zeros(ends[-1], dtype=torch.uint8, device=device)
        self._there = self.memory[: len(form)]
        """Which buffers rank 0 had, in this form."""
        self._places = {
            name: self.memory[start : start + size].view(kind).view(shape)
            for (name, shape, _), kind, start, size in zip(form, kinds, ends, sizes, strict=False)
        }

    def write(self, buffers: dict[str, Tensor]) -> None:
        """Copy into its place every buffer that still has this form."""
        found = [self._fitting(name, buffers) for name in self._places]
        self._there.copy_(torch.tensor([b is not None for b in found], dtype=torch.uint8))
        pairs = [(p, b) for p, b in zip(self._places.values(), found, strict=True) if b is not None]
        _copy([place for place, _ in pairs], [buffer.data for _, buffer in pairs])

    def read(self, buffers: dict[str, Tensor]) -> dict[str, str]:
        """Copy every buffer from its place; like forward's own changes, unknown to autograd.

        Returns what cannot be taken over, by name, for people; a buffer that this rank does not
        have yet is not meant.
        """
        pairs, odd = [], {}
        for (name, place), there in zip(self._places.items(), self._there.tolist(), strict=True):
            if not there or name not in buffers:
                continue
            buffer = self._fitting(name, buffers)
            if buffer is None:
                mine = buffers[name]
                odd[name] = (
                    f"{name} is {mine.dtype} {list(mine.shape)} here, and {place.dtype} "
                    f"{list(place.shape)} on rank 0"
                )
            else:
                pairs.append(writable(buffer.data, place))
        _copy([buffer for buffer, _ in pairs], [place for _, place in pairs])
        return odd

    def _fitting(self, name: str, buffers: dict[str, Tensor]) -> Tensor | None:
        buffer, place = buffers.get(name), self._places[name]
        fits = buffer is not None and (buffer.shape, buffer.dtype) == (place.shape, place.dtype)
        return buffer if fits else None


def _copy(to: list[Tensor], source: list[Tensor]) -> None:
    plain = [not (t.is_conj() or t.is_neg()) for t in to]
    if all(plain) and to:
        torch._foreach_copy_(to, source)
        return
    for target, value in zip(to, source, strict=True):  # foreach knows no conjugated views
        target.copy_(value)


def _kinds(buffers: dict[str, Tensor]) -> list[tuple[str, torch.Size, torch.dtype]]:
    return [(name, b.shape, b.dtype) for name, b in buffers.items()]


def _form(kinds: list[tuple[str, torch.Size, torch.dtype]]) -> list[_Entry]:
    """As JSON; without what has no elements."""
    return [
        [name, list(shape), str(dtype).removeprefix("torch.")]
        for name, shape, dtype in kinds
        if shape.numel()
    ]
