"""``sapwood trace``."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from sapwood.cli.folders import TRACE, find_run
from sapwood.cli.values import Whole
from sapwood.errors import ConfigError, TraceError
from sapwood.trace.perfetto import to_chrome
from sapwood.trace.read import Instant, Span, Trace, read_trace
from sapwood.trace.steps import step_view
from sapwood.trace.summary import RankSummary, summarise
from sapwood.trace.timeline import timeline_svg, timeline_text

__all__ = ["trace"]


def trace(
    run: str,
    /,
    *,
    step: Whole | None = None,
    summary: Annotated[bool, Parameter(negative="")] = False,
    perfetto: Path | None = None,
    svg: Path | None = None,
    as_json: Annotated[bool, Parameter(name="--json", negative="")] = False,
    folder: Path = Path("runs"),
) -> None:
    """Show where the time of a step went, over all ranks.

    Without options it draws one step as text: each rank has a lane for forward, backward and wait,
    one for the buckets being averaged and one for the buckets being updated. A digit under a B is
    a bucket that was handled while back-propagation was still busy.

    ```
    sapwood trace latest                           a typical late step of the newest run
    sapwood trace runs/20261116-0042-3f9a1c --step 40
    sapwood trace 2026 --summary                   a table with a row per rank
    sapwood trace 2026 --perfetto out.json         open it at ui.perfetto.dev
    sapwood trace 2026 --svg step.svg              a picture for a page or a paper
    sapwood trace latest --json                    the step and the summary, for a program
    ```

    Args:
        run: A run folder, the id of a run, a beginning of the id, or latest.
        step: The step to draw; a typical late one if not given.
        summary: Show a table with a row per rank instead, and what reading data cost.
        perfetto: Write the whole trace to this file, for Perfetto or chrome://tracing.
        svg: Write a picture of the step to this file.
        as_json: Write the step, the summary and what reading cost as JSON. Times are milliseconds.
        folder: Where run ids are looked for.
    """
    if as_json and (summary or perfetto is not None or svg is not None):
        raise ConfigError("--json has the step and the summary; leave the other options away")
    read = read_trace(find_run(run, folder, need=TRACE) / "trace")
    for sentence in read.skipped:
        print(f"sapwood: {sentence}", file=sys.stderr)
    if as_json:
        _show_json(read, step)
        return
    if perfetto is not None:
        _write(perfetto, json.dumps(to_chrome(read), allow_nan=False))
        print(f"wrote {perfetto}: open it at https://ui.perfetto.dev (it stays on your machine)")
    if svg is not None:
        _write(svg, timeline_svg(read, step))
        print(f"wrote {svg}")
    if summary:
        _show_summary(read)
    elif perfetto is None and svg is None:
        _show_step(read, step)


def _show_json(read: Trace, step: int | None) -> None:
    from sapwood.cli.output import print_json
    from sapwood.data.report import readings_of

    view = step_view(read, step)
    # Not those of the view, which moves spans that overlap so that they can be drawn.
    records = [
        _plain(one, view.start)
        for one in read.records
        if isinstance(one, Span | Instant) and one.args.get("step") == view.step
    ]
    shown = {"step": view.step, "ms": (view.end - view.start) / 1e6, "records": records}
    reading = [
        {"rank": one.rank, "file": one.file, **asdict(one.stats), "useful": one.stats.useful}
        for one in readings_of(read)
    ]
    ranks = [asdict(row) for row in summarise(read)]
    print_json({"run": read.run, "ranks": ranks, "step": shown, "reading": reading})


def _plain(record: Span | Instant, begin: int) -> dict[str, Any]:
    lasted = {"ms": (record.end - record.start) / 1e6} if isinstance(record, Span) else {}
    return {
        "rank": record.rank,
        "lane": record.lane,
        "name": record.name,
        "start_ms": (record.start - begin) / 1e6,
        **lasted,
        "args": dict(record.args),
    }


def _show_step(read: Trace, step: int | None) -> None:
    from sapwood.cli.output import width

    print(timeline_text(read, step, width=width()))


def _show_summary(read: Trace) -> None:
    from sapwood.cli.output import console, table

    columns = ("rank", "steps", "step ms", "wait ms", "reduces/step", "updated early")
    made = table(*columns, right=columns)
    for row in summarise(read):
        made.add_row(*_cells(row))
    console().print(made)
    console().print(
        "step and wait are medians; updated early is the share of buckets whose update ended "
        "before the last gradient of the step existed"
    )
    _show_reading(read)


def _show_reading(read: Trace) -> None:
    from sapwood.cli.output import console, table
    from sapwood.data.report import readings_of

    found = readings_of(read)
    for file in dict.fromkeys(one.file for one in found):
        stats = {one.rank: one.stats for one in found if one.file == file}
        columns = ("rank", "samples", "MB read", "useful", "KiB/read")
        seconds = ("read s", "wait s", "skew s", "stagger s")
        made = table(*columns, *seconds, right=(*columns, *seconds))
        for rank, one in stats.items():
            each = one.bytes_read / max(one.requests, 1) / 1024
            made.add_row(
                *(str(rank), str(one.samples), f"{one.bytes_read / 1e6:.1f}", f"{one.useful:.2f}"),
                *(f"{each:.0f}", f"{one.read_seconds:.2f}", f"{one.wait_seconds:.2f}"),
                *(f"{one.skew_seconds:.2f}", f"{one.stagger_seconds:.2f}"),
            )
        console().print(f"\nread from {file}", soft_wrap=True)
        console().print(made)
        missed = sum(one.missed_pages for one in stats.values())
        redundant = sum(one.redundant_pages for one in stats.values())
        switches = sum(one.switches_waiting + one.switches_forced for one in stats.values())
        console().print(
            f"useful is bytes of records for each byte read; pages missed {missed}, redundant "
            f"{redundant}; context switches {switches}"
        )


def _cells(row: RankSummary) -> tuple[str, ...]:
    return (
        str(row.rank),
        str(row.steps),
        "-" if row.step_ms is None else f"{row.step_ms:.2f}",
        "-" if row.wait_ms is None else f"{row.wait_ms:.2f}",
        "-" if row.reduces is None else f"{row.reduces:.1f}",
        "-" if row.early is None else f"{row.early:.0%}",
    )


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text)
    except OSError as error:
        raise TraceError(f"cannot write {path}: {error.strerror}") from error
