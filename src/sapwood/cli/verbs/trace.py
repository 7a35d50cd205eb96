"""``sapwood trace``."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from sapwood.cli.folders import find_run
from sapwood.errors import TraceError
from sapwood.trace.perfetto import to_chrome
from sapwood.trace.read import Trace, read_trace
from sapwood.trace.summary import RankSummary, summarise
from sapwood.trace.timeline import timeline_svg, timeline_text

__all__ = ["trace"]


def trace(
    run: str,
    /,
    *,
    step: int | None = None,
    summary: Annotated[bool, Parameter(negative="")] = False,
    perfetto: Path | None = None,
    svg: Path | None = None,
    folder: Path = Path("runs"),
) -> None:
    """Show where the time of a step went, over all ranks.

    Without options it draws one step as text: each rank has a lane for forward, backward and wait,
    one for the buckets being averaged and one for the buckets being updated. A digit under a B is
    a bucket that was handled while back-propagation was still busy.

    ```
    sapwood trace 20261116-0042-3f9a1c             a typical late step
    sapwood trace runs/20261116-0042-3f9a1c --step 40
    sapwood trace 2026 --summary                   a table with a row per rank
    sapwood trace 2026 --perfetto out.json         open it at ui.perfetto.dev
    sapwood trace 2026 --svg step.svg              a picture for a page or a paper
    ```

    Args:
        run: A run folder, the id of a run, or a beginning of the id.
        step: The step to draw; a typical late one if not given.
        summary: Show a table with a row per rank instead, and what reading data cost.
        perfetto: Write the whole trace to this file, for Perfetto or chrome://tracing.
        svg: Write a picture of the step to this file.
        folder: Where run ids are looked for.
    """
    read = read_trace(find_run(run, folder) / "trace")
    for sentence in read.skipped:
        print(f"sapwood: {sentence}", file=sys.stderr)
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
