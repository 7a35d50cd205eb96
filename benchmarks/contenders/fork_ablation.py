"""Our fork with one of its ideas left out, to see what that idea gives.

Both sides make the plan of messages themselves, by constants and functions that are put in place
here for the time of a turn; they compare what they have planned before anything is sent.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

NONE = ""


@contextlib.contextmanager
def replaced(module: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, before)


@contextlib.contextmanager
def unsharded() -> Iterator[None]:
    """Every donor sends its clone all of the state; the clones pass nothing on."""
    from sapwood.clone import manifest, plan, serving

    make = serving.make_manifest

    def without_relay(*given: Any) -> Any:
        whole = replace(make(*given), relay=False, digest="")
        return replace(whole, digest=whole.plan().digest)

    with (
        replaced(manifest, "plan_direct", plan.plan_whole),
        replaced(serving, "make_manifest", without_relay),
    ):
        yield


def unpacked() -> contextlib.AbstractContextManager[None]:
    """Every part of a tensor is a message of its own, however small."""
    from sapwood.clone import plan

    return replaced(plan, "LARGE_PART", 0)


def sliced() -> contextlib.AbstractContextManager[None]:
    """Small tensors are cut into shares like large ones."""
    from sapwood.state import shards

    return replaced(shards, "SMALL_SLICE", 0)


ABLATIONS: dict[str, Callable[[], contextlib.AbstractContextManager[None]]] = {
    NONE: contextlib.nullcontext,
    "unsharded": unsharded,
    "unpacked": unpacked,
    "sliced": sliced,
}
