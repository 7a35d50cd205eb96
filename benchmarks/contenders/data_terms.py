"""What the benchmarks of reading have in common: records, and what is measured of reading them."""

from __future__ import annotations

from core import Contender, Metric

# A batch is of all ranks together.
_KB3 = {"nbytes": 3 * 1024, "batch": 256}
_KB190 = {"nbytes": 190 * 1024, "batch": 32}
QUICK_SIZES = {"3kb": {"count": 10_000, **_KB3}, "190kb": {"count": 300, **_KB190}}
FULL_SIZES = {"3kb": {"count": 100_000, **_KB3}, "190kb": {"count": 3_000, **_KB190}}
RAW_DISK = Contender(
    name="raw disk",
    role="limit",
    note="O_DIRECT reads of the whole LMDB file, 1 MiB each, 2 threads for each rank; cold",
)
COSTS = (
    Metric(
        name="rate",
        unit="1000 records/s",
        better="higher",
        meaning="records all ranks got, by the time of the slowest, files being opened in it; one "
        "epoch from disk, and from memory as many as a second is enough for",
        ratios=True,
    ),
    Metric(name="bytes", unit="MB/s", better="higher", digits=0, meaning="of records"),
    Metric(
        name="cpu", unit="s/GB", digits=2, meaning="CPU of all ranks and workers, for a GB of them"
    ),
    Metric(
        name="memory",
        unit="MiB",
        digits=0,
        meaning="most that a rank and its workers held beyond the start, in an untimed epoch; "
        "anonymous and shared memory, page cache not counted",
    ),
)
TURNS = (
    Metric(name="first", unit="ms", digits=0, meaning="until the slowest rank had its first batch"),
    Metric(name="part", unit="%", digits=0, better="higher", meaning="of an epoch, read in a turn"),
)
