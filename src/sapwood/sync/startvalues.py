"""All ranks start from rank 0's values, as DistributedDataParallel has it."""

from __future__ import annotations

from torch import nn

from sapwood.runtime.group import Group
from sapwood.state.contents import byte_view, ordered_bytes
from sapwood.state.tensors import named_buffers, named_parameters, writable

__all__ = ["give_rank0_values"]


def give_rank0_values(group: Group, model: nn.Module) -> None:
    """Give every rank the parameters and buffers of rank 0."""
    if group.world == 1:
        return
    tensors = [
        t.detach() for t in (*named_parameters(model).values(), *named_buffers(model).values())
    ]
    tensors = [tensor for tensor in tensors if tensor.numel()]
    # As bytes: gloo does not know every dtype.
    sent = [ordered_bytes(tensor) for tensor in tensors]
    for pending in [group.broadcast(t, "sending rank 0's values") for t in sent]:
        pending.wait()
    for tensor, value in zip(tensors, sent, strict=True):
        if byte_view(tensor) is None:
            target, first = writable(tensor, value.view(tensor.dtype).view(tensor.shape))
            target.copy_(first)
