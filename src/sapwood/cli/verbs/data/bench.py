"""``sapwood data bench``."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from sapwood.cli.values import Whole
from sapwood.cli.words import progress, size

if TYPE_CHECKING:
    from sapwood.data.bench import Report, Row

__all__ = ["bench"]

# The library has these too, but loads torch.
Shuffle = Literal["none", "window", "global", "reuse"]
Policy = Literal["auto", "lmdb", "lmm", "lmm-dm", "dio", "coal"]


def bench(
    database: str,
    *,
    name: str | None = None,
    batch_size: Whole = 256,
    shuffle: Shuffle = "window",
    policy: Annotated[list[Policy] | None, Parameter(negative="")] = None,
    seconds: float = 3.0,
    json: Annotated[bool, Parameter(negative="")] = False,
) -> None:
    """Read your own database for some seconds, beside py-lmdb and the disk itself.

    Each way reads in turns with the others: *cold*, the page cache having dropped the file before
    each epoch, and *warm*, with the file in it. `of disk` compares bytes with what the raw disk
    gives (reads of 1 MiB past the page cache, two at a time). This is one process; ranks share a
    disk. Nothing is written beside the database.

    ```
    sapwood data bench train.mdb
    sapwood data bench train.mdb --policy auto --policy coal --policy lmdb --seconds 10
    sapwood data bench /data/imagenet --name jpg --shuffle global --batch-size 64
    ```

    Args:
        database: An LMDB file, or a folder with data.mdb in it.
        name: A named database; the main one if none is given.
        batch_size: Records of a batch.
        shuffle: The order; py-lmdb gets keys in any order unless it is none.
        policy: How our reader reads; may be given several times.
        seconds: How long each way reads, cold and warm.
        json: Write JSON instead of a table.
    """
    from sapwood.cli.output import print_json
    from sapwood.data.bench import bench as measure

    report = measure(
        database,
        database=name,
        batch_size=batch_size,
        shuffle=shuffle,
        policies=policy or ["auto"],
        seconds=seconds,
        phase=lambda what, total: progress(what, total, unit="time"),
    )
    if json:
        print_json(asdict(report))
    else:
        _show(report)


def _show(report: Report) -> None:
    from sapwood.cli.output import console, table

    print(
        f"{report.records} records, {size(report.value_bytes)} of values in a file of "
        f"{size(report.file_bytes)}"
    )
    for cold in (True, False):
        rows = [row for row in report.rows if row.cold == cold]
        if not rows:
            continue
        drawn = table("cold" if cold else "warm", *_NUMBERS, right=_NUMBERS)
        for row in rows:
            drawn.add_row(*_cells(row))
        console().print(drawn)
    for note in report.notes:
        print(note)


_NUMBERS = ("samples/s", "MB/s", "of disk")


def _cells(row: Row) -> tuple[str, ...]:
    samples = "-" if row.samples is None else f"{row.samples:,.0f}"
    return f"{row.name:<16}", samples, f"{row.nbytes / 1e6:,.1f}", f"{row.of_disk:.2f}"
