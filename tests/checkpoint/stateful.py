"""Things with a state, for checkpoints and forks."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch


class Box:
    """Holds any value."""

    def __init__(self, value: Any = None) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


class Broken(Box):
    """Fails to say its state as long as it is told to."""

    def __init__(self) -> None:
        super().__init__(1)
        self.broken = True

    def state_dict(self) -> dict[str, Any]:
        if self.broken:
            raise ZeroDivisionError("the user's own mistake")
        return super().state_dict()


def same_value(left: Any, right: Any) -> bool:
    """Whether two values are of the same type and equal, down to bytes, orders and limits."""
    if type(left) is not type(right):
        return False
    if isinstance(left, torch.Tensor):
        facts = [(t.dtype, t.shape, t.requires_grad) for t in (left, right)]
        plain = [t.detach().resolve_conj().contiguous() for t in (left, right)]
        raw = [t.reshape(-1).view(torch.uint8) for t in plain]
        return facts[0] == facts[1] and torch.equal(*raw)
    if isinstance(left, np.ndarray | np.generic):
        both = [np.asarray(left), np.asarray(right)]
        facts = [(a.dtype, a.dtype.str, a.shape, np.isfortran(a)) for a in both]
        # A long double has bytes that mean nothing.
        same = left == right if left.dtype.char == "g" else left.tobytes() == right.tobytes()
        return facts[0] == facts[1] and bool(same)
    if isinstance(left, dict):
        extra = [
            (getattr(d, "default_factory", 0), getattr(d, "_metadata", 0)) for d in (left, right)
        ]
        return (
            extra[0] == extra[1]
            and len(left) == len(right)
            and all(same_value(a, b) for a, b in zip(left.items(), right.items(), strict=True))
        )
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(same_value, left, right))
    if isinstance(left, float | complex):
        return repr(left) == repr(right)
    return bool(left == right) and getattr(left, "maxlen", 0) == getattr(right, "maxlen", 0)
