"""Weights whose memory other tensors share, so that updating them early changes those too.

A view keeps autograd's version counter; what was taken through ``.data`` or numpy does not. If a
model reads such an alias, autograd neither knows that it is the weight nor that it was changed.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise

from torch import Tensor, nn

from sapwood.errors import ConfigError
from sapwood.sync.nested import tensors_in

__all__ = ["aliased_weights", "check_distinct"]

_Span = tuple[int, int]
"""Addresses: of the first byte, and behind the last."""


def aliased_weights(model: nn.Module, weights: Sequence[Tensor]) -> set[int]:
    """Which weights share memory with another tensor that a module holds, registered or not."""
    spans = sorted((span, i) for i, w in enumerate(weights) if (span := _span(w)) is not None)
    starts = [start for (start, _), _ in spans]
    reach = list(accumulate((stop for (_, stop), _ in spans), max))
    trained = {id(weight) for weight in weights}
    found: set[int] = set()
    for module in model.modules():
        for tensor in tensors_in(vars(module)):
            span = None if id(tensor) in trained else _span(tensor)
            if span is None:
                continue
            last = bisect_left(starts, span[1]) - 1
            while last >= 0 and reach[last] > span[0]:
                (_, stop), index = spans[last]
                if stop > span[0]:
                    found.add(index)
                last -= 1
    return found


def check_distinct(weights: Mapping[str, Tensor]) -> None:
    """See that no two trained weights are the same memory.

    Raises:
        ConfigError: two are: both would be updated, in an order that is not the same on all ranks.
    """
    spans = ((_span(weight), name) for name, weight in weights.items() if _is_dense(weight))
    known = sorted((span, name) for span, name in spans if span is not None)
    for ((_, stop), first), ((start, _), second) in pairwise(known):
        if start < stop:
            raise ConfigError(
                f"{first} and {second} are two parameters that share memory, so that each would be "
                "updated with the other's gradient as well; make them one parameter (assign the "
                "Parameter itself, not its .data), or give each memory of its own"
            )


def _span(tensor: Tensor) -> _Span | None:
    """The memory from a tensor's first to its last element; None if it has none."""
    try:
        start = tensor.data_ptr()
        reach = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    except (NotImplementedError, RuntimeError):  # sparse, or a wrapper around others
        return None
    if not start or not tensor.numel():
        return None
    return start, start + (reach + 1) * tensor.element_size()


def _is_dense(tensor: Tensor) -> bool:
    """Whether all memory in its span is its own; columns of a matrix may lie between others."""
    span = _span(tensor)
    return span is not None and span[1] - span[0] == tensor.numel() * tensor.element_size()
