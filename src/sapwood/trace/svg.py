"""One step of all ranks as a standalone SVG picture, made by hand so that it needs no library."""

from __future__ import annotations

from html import escape

from sapwood.trace.read import Span, Trace
from sapwood.trace.steps import Lane, StepView, bucket_label, step_view

__all__ = ["timeline_svg"]

_COLOURS = {"forward": "#8fb8de", "backward": "#e3a76f", "wait": "#d9d9d9"}
_BUCKETS = ("#4c9f70", "#7fb685", "#2f6f8f", "#a3c585", "#5b8fb9", "#3f7d58", "#93b7be", "#6a994e")
_OTHER = "#b8a9c9"
_INK, _FAINT = "#222222", "#e6e6e6"
_DASHED = 'stroke="#b3261e" stroke-width="1.5" stroke-dasharray="4 3"'
_LEFT, _RIGHT, _TOP, _BOTTOM = 118, 24, 64, 58
_ROW, _GAP, _RANK_GAP = 24, 6, 16
_LEGEND = (
    ("forward", _COLOURS["forward"]),
    ("backward", _COLOURS["backward"]),
    ("wait", _COLOURS["wait"]),
    ("bucket averaged (comm) and applied (update)", _BUCKETS[0]),
)


def timeline_svg(
    trace: Trace, step: int | None = None, *, width: int = 960, title: str | None = None
) -> str:
    """Draw one step as an SVG document.

    Args:
        trace: What `read_trace` returned.
        step: The step; by default a typical late one.
        width: Width of the picture in pixels.
        title: Its headline; by default the step and the run.

    Raises:
        TraceError: The trace has no such step.
    """
    view = step_view(trace, step)
    picture = _Picture(view, width)
    for lane in view.lanes:
        picture.lane(lane)
    headline = title or f"Step {view.step} of run {view.run}"
    return picture.finish(headline)


class _Picture:
    """Collects SVG elements from top to bottom."""

    def __init__(self, view: StepView, width: int) -> None:
        self._view = view
        self._width = max(width, 480)
        self._y = float(_TOP)
        self._rank: int | None = None
        self._shapes: list[str] = []
        self._over: list[str] = []
        self._rank_top = self._y
        self._marks: list[float] = []

    def lane(self, lane: Lane) -> None:
        """Add one lane, with the rank's name at its first one."""
        if lane.rank != self._rank:
            self._end_rank()
            self._y += 0 if self._rank is None else _RANK_GAP
            self._rank, self._rank_top = lane.rank, self._y
            self._text(14, self._y + 16, f"rank {lane.rank}", weight="600")
        self._text(_LEFT - 10, self._y + 16, lane.name, anchor="end", size=12)
        for row in lane.rows or ((),):
            self._shapes.append(_box(_LEFT, self._y, self._inner(), _ROW, "#fafafa"))
            for span in row:
                self._span(span)
            self._y += _ROW + _GAP
        marks = (i.start for i in lane.instants if i.name == "backward_last_gradient")
        self._marks.extend(map(self._x, marks))

    def finish(self, headline: str) -> str:
        """Close the picture: grid, axis, legend, headline."""
        self._end_rank()
        height = self._y + _BOTTOM
        grid = self._grid()
        self._text(14, 28, headline, size=17, weight="600")
        total = (self._view.end - self._view.start) / 1e6
        self._text(14, 48, f"{total:.2f} ms from first to last event", size=12)
        self._legend(self._y + 42)
        body = "\n".join([*grid, *self._shapes, *self._over])
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{self._width}" '
            f'height="{height:.0f}" viewBox="0 0 {self._width} {height:.0f}" role="img" '
            f'aria-label="{escape(headline)}" font-family="Helvetica, Arial, sans-serif">\n'
            f"{_box(0, 0, self._width, height, '#ffffff')}\n{body}\n</svg>\n"
        )

    def _inner(self) -> float:
        return self._width - _LEFT - _RIGHT

    def _x(self, time: int) -> float:
        length = max(1, self._view.end - self._view.start)
        return _LEFT + (time - self._view.start) * self._inner() / length

    def _span(self, span: Span) -> None:
        x = self._x(span.start)
        wide = max(1.5, self._x(span.end) - x)
        label, colour = _look(span)
        tip = escape(f"{span.name} {(span.end - span.start) / 1e6:.3f} ms")
        rect = _box(x, self._y, wide, _ROW, colour, tip=tip)
        self._shapes.append(rect)
        if wide >= 7 * len(label) + 4:
            self._text(x + wide / 2, self._y + 16, label, anchor="middle", size=12)

    def _end_rank(self) -> None:
        """Draw the marks of a rank over all of its lanes, whose number is known only now."""
        for x in self._marks:
            self._over.append(
                f'<line x1="{x:.1f}" y1="{self._rank_top - 4:.1f}" x2="{x:.1f}" '
                f'y2="{self._y:.1f}" {_DASHED}><title>last gradient exists</title></line>'
            )
        self._marks.clear()

    def _grid(self) -> list[str]:
        lines = []
        for tick in _ticks(self._view.end - self._view.start):
            x = self._x(self._view.start + tick)
            lines.append(
                f'<line x1="{x:.1f}" y1="{_TOP - 6}" x2="{x:.1f}" y2="{self._y:.1f}" '
                f'stroke="{_FAINT}"/>'
            )
            self._text(x, self._y + 12, f"{tick / 1e6:g} ms", anchor="middle", size=11)
        return lines

    def _legend(self, y: float) -> None:
        x = float(_LEFT)
        for name, colour in _LEGEND:
            self._shapes.append(_box(x, y - 11, 14, 14, colour))
            self._text(x + 20, y, name, size=12)
            x += 36 + 6.4 * len(name)
        self._over.append(
            f'<line x1="{x:.1f}" y1="{y - 4:.1f}" x2="{x + 16:.1f}" y2="{y - 4:.1f}" {_DASHED}/>'
        )
        self._text(x + 22, y, "last gradient exists", size=12)

    def _text(
        self,
        x: float,
        y: float,
        text: str,
        *,
        anchor: str = "start",
        size: int = 13,
        weight: str = "400",
    ) -> None:
        self._over.append(
            f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}" '
            f'font-weight="{weight}" fill="{_INK}">{escape(text)}</text>'
        )


def _look(span: Span) -> tuple[str, str]:
    if span.name in _COLOURS:
        return span.name, _COLOURS[span.name]
    bucket = span.args.get("bucket")
    if isinstance(bucket, int):
        return bucket_label(span), _BUCKETS[bucket % len(_BUCKETS)]
    return span.name, _OTHER


def _box(x: float, y: float, wide: float, high: float, fill: str, *, tip: str = "") -> str:
    end = f"><title>{tip}</title></rect>" if tip else "/>"
    return (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{wide:.1f}" height="{high:.1f}" '
        f'rx="2" fill="{fill}"{end}'
    )


def _ticks(length: int) -> list[int]:
    """About five round times within ``length`` nanoseconds."""
    size = 1
    while size * 50 <= length:
        size *= 10
    step = next(size * k for k in (1, 2, 5, 10) if size * k * 7 >= length or k == 10)
    return list(range(0, length + 1, step))
