"""Failing together: where all ranks act, one that cannot must not leave the others waiting."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from sapwood.errors import CheckpointError, PeerFailed
from sapwood.runtime.group import Group

__all__ = ["on_all_ranks"]

T = TypeVar("T")


def on_all_ranks(group: Group, what: str, act: Callable[[], T]) -> T:
    """Do something on all ranks; if it fails on one of them, all raise, and none goes on alone.

    ``what`` completes "rank 1 cannot ...".

    Raises:
        CheckpointError: it failed on another rank. What failed here is raised as it is.
    """
    problem: Exception | None = None
    try:
        result = act()
    except PeerFailed:
        raise  # every rank hears of that by itself
    except Exception as error:
        problem = error
    text = "" if problem is None else f"{type(problem).__name__}: {problem}"
    texts = group.gather_text(f"answer whether it can {what}", text)
    if problem is not None:
        raise problem
    for rank, told in enumerate(texts):
        if told:
            raise CheckpointError(f"rank {rank} cannot {what}: {told}")
    return result
