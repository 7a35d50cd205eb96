"""In which order will gradients be ready? Found by replaying the autograd engine on its own graph.

PyTorch's engine runs nodes by readiness and, among the ready ones, by highest sequence number
(gradient accumulators first). The graph is there before the first gradient is, so the order of the
first backward is known before it happens, and with it the buckets.
"""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Iterable, Sequence
from itertools import count

from torch import Tensor
from torch.autograd.graph import Node

__all__ = ["graph_roots", "joint_order", "ready_order"]

_LEAF = "torch::autograd::AccumulateGrad"


def graph_roots(output: object) -> list[Node]:
    """The autograd nodes of all tensors in a model's output, however nested."""
    if isinstance(output, Tensor):
        return [output.grad_fn] if output.grad_fn is not None else []
    if isinstance(output, dict):
        return [node for value in output.values() for node in graph_roots(value)]
    if isinstance(output, (list, tuple)):
        return [node for value in output for node in graph_roots(value)]
    if dataclasses.is_dataclass(output):
        values = (getattr(output, field.name, None) for field in dataclasses.fields(output))
        return [node for value in values for node in graph_roots(value)]
    return []


def ready_order(roots: Iterable[Node], parameters: Sequence[Tensor]) -> list[int]:
    """Indices of ``parameters`` in the order their gradients will be complete.

    Parameters the graph does not reach are left out.
    """
    roots = list(dict.fromkeys(roots))
    waiting_for = _dependencies(roots)
    index = {id(p): i for i, p in enumerate(parameters)}
    ticket = count()
    heap = [(-n._sequence_nr(), next(ticket), n) for n in roots if not waiting_for.get(n)]
    heapq.heapify(heap)
    order: list[int] = []
    while heap:
        node = heapq.heappop(heap)[2]
        # A Function of the user's may have an attribute of that name, too.
        leaf = getattr(node, "variable", None) if node.name() == _LEAF else None
        if leaf is not None and id(leaf) in index:
            order.append(index[id(leaf)])
        for child, _ in node.next_functions:
            if child is None:
                continue
            waiting_for[child] -= 1
            if waiting_for[child] == 0:
                heapq.heappush(heap, (-child._sequence_nr(), next(ticket), child))
    return order


def _dependencies(roots: list[Node]) -> dict[Node, int]:
    """How many nodes each node waits for."""
    waiting_for: dict[Node, int] = {}
    seen = set(roots)
    stack = list(roots)
    while stack:
        for child, _ in stack.pop().next_functions:
            if child is None:
                continue
            waiting_for[child] = waiting_for.get(child, 0) + 1
            if child not in seen:
                seen.add(child)
                stack.append(child)
    return waiting_for


def joint_order(earlier: Sequence[int], later: Sequence[int]) -> list[int]:
    """The order of one backward pass over the graphs of two forwards.

    Autograd works off the later forward first, so a parameter that both used is complete when the
    earlier one's nodes have run.
    """
    known = set(earlier)
    return [i for i in later if i not in known] + list(earlier)
