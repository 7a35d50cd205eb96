"""Picking the records of one step out of a trace, and laying lanes out in rows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from sapwood.errors import TraceError
from sapwood.trace.read import Counter, Instant, Span, Trace

__all__ = [
    "Lane",
    "StepView",
    "bucket_label",
    "late_step",
    "pack_rows",
    "step_view",
    "steps_of",
]

_LANE_ORDER = ("main", "comm", "update")
_MAX_ROWS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Lane:
    """One lane of one rank during one step.

    Spans that overlap are in two rows; where even that is not enough there is one row, and each
    span starts when the one before it has ended.
    """

    rank: int
    name: str
    rows: tuple[tuple[Span, ...], ...]
    instants: tuple[Instant, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepView:
    """Everything to draw of one step; ``start`` and ``end`` hold for all ranks."""

    run: str
    step: int
    start: int
    end: int
    lanes: tuple[Lane, ...]

    @property
    def spans(self) -> tuple[Span, ...]:
        """All spans of the step."""
        return tuple(span for lane in self.lanes for row in lane.rows for span in row)


def steps_of(trace: Trace) -> tuple[int, ...]:
    """The steps that any rank wrote about, in order."""
    found = {_step(record) for record in trace.records if isinstance(record, Span | Instant)}
    return tuple(sorted(step for step in found if step is not None))


def late_step(trace: Trace) -> int:
    """A typical late step: of the second half of the steps every rank ended, the median by length.

    A single step tells little on a busy machine, and the last one may be disturbed by the end.

    Raises:
        TraceError: No record of the trace names a step.
    """
    ended: dict[int, set[int]] = {}
    for record in trace.records:
        step = _step(record) if isinstance(record, Instant) else None
        if step is not None and record.name == "step_ended":
            ended.setdefault(step, set()).add(record.rank)
    everywhere = [step for step, ranks in ended.items() if len(ranks) == len(trace.ranks)]
    steps = sorted(everywhere) or list(steps_of(trace))
    if not steps:
        raise TraceError(f"the trace of run {trace.run} has no step: did the run get that far?")
    lengths = _lengths(trace)
    late = sorted(steps[len(steps) // 2 :], key=lambda step: lengths[step])
    return late[len(late) // 2]


def _lengths(trace: Trace) -> dict[int, int]:
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for record in trace.records:
        step = None if isinstance(record, Counter) else _step(record)
        if step is not None:
            end = record.end if isinstance(record, Span) else record.start
            first[step] = min(first.get(step, record.start), record.start)
            last[step] = max(last.get(step, end), end)
    return {step: last[step] - first[step] for step in first}


def step_view(trace: Trace, step: int | None = None) -> StepView:
    """Select one step; without ``step`` a typical late one.

    Raises:
        TraceError: The trace has no such step; the message says which steps it has.
    """
    chosen = late_step(trace) if step is None else step
    records = [r for r in trace.records if isinstance(r, Span | Instant) and _step(r) == chosen]
    if not records:
        raise TraceError(f"run {trace.run} has no step {chosen} in its trace; {_range(trace)}")
    keys = sorted({(r.rank, r.lane) for r in records}, key=lambda key: (key[0], _lane_key(key[1])))
    lanes = []
    for rank, name in keys:
        here = [r for r in records if (r.rank, r.lane) == (rank, name)]
        lanes.append(
            Lane(
                rank=rank,
                name=name,
                rows=_few_rows([r for r in here if isinstance(r, Span)]),
                instants=tuple(r for r in here if isinstance(r, Instant)),
            )
        )
    return StepView(
        run=trace.run,
        step=chosen,
        start=min(r.start for r in records),
        end=max(r.end if isinstance(r, Span) else r.start for r in records),
        lanes=tuple(lanes),
    )


def pack_rows(spans: Iterable[Span], *, nested: bool = False) -> tuple[tuple[Span, ...], ...]:
    """Distribute spans over as few rows as it takes for none to overlap another.

    With ``nested`` a span may lie inside another of its row, as trace viewers draw it.
    """
    rows: list[_Row] = []
    for span in sorted(spans, key=lambda s: (s.start, -s.end)):
        row = next((row for row in rows if row.has_room(span, nested)), None)
        if row is None:
            row = _Row()
            rows.append(row)
        row.spans.append(span)
        row.open_ends.append(span.end)
    return tuple(tuple(row.spans) for row in rows)


def _few_rows(spans: list[Span]) -> tuple[tuple[Span, ...], ...]:
    """Rows to draw; when many spans overlap, one row that shows the oldest running at each moment.

    Collectives are carried out in order, so the oldest in flight is the one being worked on.
    """
    rows = pack_rows(spans)
    if len(rows) <= _MAX_ROWS:
        return rows
    shown: list[Span] = []
    busy_until = 0
    for span in sorted(spans, key=lambda s: (s.start, s.end)):
        start = max(span.start, busy_until)
        if span.end > start:
            shown.append(replace(span, start=start))
            busy_until = span.end
    return (tuple(shown),)


class _Row:
    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.open_ends: list[int] = []

    def has_room(self, span: Span, nested: bool) -> bool:
        while self.open_ends and self.open_ends[-1] <= span.start:
            self.open_ends.pop()
        return not self.open_ends or (nested and span.end <= self.open_ends[-1])


def bucket_label(span: Span) -> str:
    """One character for a span: its bucket where it has one, else the first letter of its name."""
    bucket = span.args.get("bucket")
    if not isinstance(bucket, int):
        return span.name[:1] or "?"
    digits = "0123456789abcdefghijklmnopqrstuvwxyz"
    return digits[bucket] if 0 <= bucket < len(digits) else "#"


def _step(record: Span | Instant) -> int | None:
    step = record.args.get("step")
    return step if isinstance(step, int) else None


def _lane_key(lane: str) -> tuple[int, str]:
    known: Sequence[str] = _LANE_ORDER
    return (known.index(lane) if lane in known else len(known), lane)


def _range(trace: Trace) -> str:
    steps = steps_of(trace)
    return f"it has steps {steps[0]} to {steps[-1]}" if steps else "it has no step at all"
