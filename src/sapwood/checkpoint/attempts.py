"""Drawing attempts: one when a checkpointer starts, and another after each restore."""

from __future__ import annotations

import json
import math
import secrets
import time
from collections.abc import Collection

from sapwood.checkpoint.branches import Attempt
from sapwood.runtime.group import Group
from sapwood.tiers.identity import CheckpointId, Lineage, root_of

__all__ = ["begin_attempt"]

_TICK = 1e-3
"""Seconds from one attempt to the next where the clock says that the next began earlier."""


def begin_attempt(
    group: Group,
    run: str,
    *,
    restored: CheckpointId | None = None,
    lineage: Lineage | None = None,
    after: float = -math.inf,
    taken: Collection[str] = (),
) -> Attempt:
    """Draw a new attempt; rank 0 does, and all ranks get the same.

    Args:
        group: all ranks take part.
        run: the id of the run.
        restored: the checkpoint it goes on from.
        lineage: that checkpoint's own.
        after: when the latest attempt known so far began.
        taken: names of attempts there are.
    """
    name = secrets.token_hex(3)
    while name in taken:
        name = secrets.token_hex(3)
    before = lineage.ancestry if lineage is not None else ()
    mine = Lineage(
        run=run,
        began=max(time.time(), after + _TICK),
        root=name if restored is None else root_of(lineage),
        ancestry=before if restored is None else (*before, restored),
    )
    text = json.dumps([name, mine.to_json()])
    name, agreed = json.loads(group.share_text("checkpoint attempt", text))
    return Attempt(name, Lineage.from_json(agreed))
