"""Who may complete an upload: one writer per key, also where the server would let two.

Completing a multipart upload only if there is no such object (``If-None-Match``) is atomic at
Amazon. Other servers look first and complete then, so that of writers who complete in the same
moment several are told that they were the only one. Putting a small object conditionally is atomic
everywhere; so a writer creates a small object first, which allows it to complete.

    .claims/packs/3f9a1c/00000000     the writer that completes packs/3f9a1c
    .claims/packs/3f9a1c/00000001     the one after it, should that one have died

Nothing of this is seen by readers. A claim is removed once the object is there; if its writer dies
before, the next one waits ``_PATIENCE`` seconds for it and then makes a claim after it. A writer
that was merely slow comes to an object that is there by then.
"""

from __future__ import annotations

import time

from sapwood.errors import Unreachable
from sapwood.runtime.heartbeat import beat
from sapwood.storage.s3.objects import Objects

__all__ = ["Claims"]

_HOME = ".claims"
_PATIENCE = 60.0
_PAUSE = 0.2


class Claims:
    """The claims of a bucket's prefix."""

    def __init__(self, objects: Objects) -> None:
        """It owns nothing."""
        self._objects = objects

    def get(self, key: str, mark: str) -> bool:
        """Wait until this writer may complete its upload; False if the object is there.

        Raises:
            Unreachable: other writers hold it for too long.
        """
        number, seen = 0, time.monotonic()
        deadline = seen + 10 * _PATIENCE
        while time.monotonic() < deadline:
            if self._objects.size(key) is not None:
                return False
            if self._objects.put_marked(_name(key, number), [mark.encode()], mark, replace=False):
                return True
            beat()
            if self._objects.size(_name(key, number)) is None:
                number, seen = 0, time.monotonic()  # it was published, or given up
                continue
            if time.monotonic() - seen > _PATIENCE:
                number, seen = number + 1, time.monotonic()
                continue
            time.sleep(_PAUSE)
        raise Unreachable(f"{key}: other writers claim it and do not come to an end; try again")

    def drop(self, key: str) -> None:
        """The object is there, or its writer gave up."""
        self._objects.delete(self._objects.names(f"{_HOME}/{key}"))

    def clear(self, quiet: float) -> None:
        """Remove what writers that died have left."""
        found = self._objects.entries(_HOME)
        now = time.time()
        self._objects.delete([name for name, one in found.items() if now - one.changed >= quiet])


def _name(key: str, number: int) -> str:
    return f"{_HOME}/{key}/{number:08d}"
