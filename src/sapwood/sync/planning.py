"""Making a plan: the order all ranks agree on, cut into buckets of the size that was measured."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Sequence

from sapwood.events import PlanChanged, TensorUpdated
from sapwood.sync.base import Context
from sapwood.sync.plan import Plan, agree_order, lay_out

__all__ = ["agree_plan", "announce_plan", "observed_order"]

log = logging.getLogger(__name__)


def agree_plan(context: Context, mine: Sequence[int], reason: str) -> Plan:
    """A plan from this rank's order of gradients and the others'; all ranks call it together."""
    order = agree_order(context.group, mine)
    tuner = context.tuner
    nbytes = sum(context.parameters[i].nbytes for i in order)
    tuner.begin(nbytes, late=not context.events.wants(TensorUpdated))
    tuner.decide()
    return lay_out(
        order,
        context.parameters,
        first_bytes=int(context.settings.first_bucket_mb * 2**20),
        bucket_bytes=int(tuner.choice.bucket_mb * 2**20),
        reason=reason,
    )


def announce_plan(
    context: Context, step: int, buckets: tuple[tuple[str, ...], ...], reason: str
) -> None:
    """Tell of a plan in the log, in the trace and to subscribers, with what was measured for it."""
    learned = context.tuner.learned
    log.info("planned %d buckets: %s%s", len(buckets), reason, f" ({learned})" if learned else "")
    if context.trace.on:
        count = len(buckets)
        context.trace.instant("plan", step=step, buckets=count, reason=reason, learned=learned)
    context.events.publish(PlanChanged(step=step, buckets=buckets, reason=reason))


def observed_order(plan: Plan, fired: Iterable[int], leaving: Collection[int]) -> list[int]:
    """The order gradients came in, then what did not come now but may come again."""
    came = list(dict.fromkeys(fired))
    seen = set(came)
    return came + [i for i in plan.order if i not in seen and i not in leaving]
