"""One step of all ranks as text, lanes one below the other.

step 7 of run demo: 12.40 ms, one column is 0.16 ms
rank 0 main    FFFFFFFFFFFFBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBww
                                                          ^ |
       comm                    000000 1111111 222222 33333
       update                        0       1      2     3
"""

from __future__ import annotations

from collections.abc import Sequence

from sapwood.trace.read import Instant, Span, Trace
from sapwood.trace.steps import Lane, StepView, bucket_label, step_view
from sapwood.trace.svg import timeline_svg

__all__ = ["timeline_svg", "timeline_text"]

_LETTERS = {"forward": "F", "backward": "B", "wait": "w"}
_MARKS = {"backward_last_gradient": "^", "step_ended": "|", "tensor_updated": "'"}
_LEGEND = (
    "F forward",
    "B backward",
    "w wait",
    "0-9 bucket (oldest in flight)",
    "+ several in one column",
    "^ last gradient exists",
    "| step ended",
)
_MIN_COLUMNS = 20


def timeline_text(trace: Trace, step: int | None = None, *, width: int = 100) -> str:
    """Draw one step as text of at most ``width`` columns (but at least 20 for the drawing).

    Raises:
        TraceError: The trace has no such step.
    """
    view = step_view(trace, step)
    labels = [_label(lane, view) for lane in view.lanes]
    margin = max(len(label) for label in labels) + 1
    columns = max(_MIN_COLUMNS, width - margin - 1)
    lines = _title(view, columns, width)
    for label, lane in zip(labels, view.lanes, strict=True):
        for index, row in enumerate(_lane_rows(lane, view, columns)):
            lines.append(f"{label if index == 0 else '':<{margin}}{row}".rstrip())
    return "\n".join([*lines, *_fill(_LEGEND, width)])


def _fill(phrases: Sequence[str], width: int, between: str = "  ") -> list[str]:
    """As many phrases to a line as fit, none of them cut."""
    lines: list[str] = []
    for phrase in phrases:
        if lines and len(lines[-1]) + len(between) + len(phrase) <= width:
            lines[-1] += between + phrase
        else:
            lines.append(phrase)
    return lines


def _label(lane: Lane, view: StepView) -> str:
    rank = f"rank {lane.rank}"
    first = next(other for other in view.lanes if other.rank == lane.rank)
    return f"{rank if lane is first else '':<{len(rank)}} {lane.name}"


def _title(view: StepView, columns: int, width: int) -> list[str]:
    total = (view.end - view.start) / 1e6
    scale = f"one column is {total / columns:.3f} ms"
    return _fill((f"step {view.step} of run {view.run}: {total:.2f} ms,", scale), width, " ")


def _lane_rows(lane: Lane, view: StepView, columns: int) -> list[str]:
    rows = [_paint(row, view, columns) for row in lane.rows]
    if lane.instants and (lane.name == "main" or not rows):
        rows.append(_mark(lane.instants, view, columns))
    return ["".join(row) for row in rows]


def _paint(spans: tuple[Span, ...], view: StepView, columns: int) -> list[str]:
    row = [" "] * columns
    for span in spans:
        letter = _LETTERS.get(span.name) or bucket_label(span)
        first = min(columns - 1, _column(span.start, view, columns))
        last = max(first + 1, _column(span.end, view, columns))
        for column in range(first, min(last, columns)):
            row[column] = letter if row[column] in (" ", letter) else "+"
    return row


def _mark(instants: tuple[Instant, ...], view: StepView, columns: int) -> list[str]:
    row = [" "] * columns
    for instant in instants:
        mark = _MARKS.get(instant.name, "!")
        column = min(columns - 1, _column(instant.start, view, columns))
        # Two marks may fall into one column; the later one steps aside rather than vanish.
        while row[column] not in (" ", mark) and column < columns - 1:
            column += 1
        row[column] = mark
    return row


def _column(time: int, view: StepView, columns: int) -> int:
    length = max(1, view.end - view.start)
    return round((time - view.start) * columns / length)
