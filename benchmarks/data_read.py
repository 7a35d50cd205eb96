"""How fast do training records come from disk, or from memory, to the ranks of a training?

python benchmarks/data_read.py --quick
python benchmarks/data_read.py --full --case records=3kb --case ranks=1
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from contenders.data_index import index_seconds
from contenders.data_session import DataSession, read_ahead
from contenders.data_terms import COSTS, FULL_SIZES, QUICK_SIZES, RAW_DISK, TURNS
from core import Benchmark, Case, Contender, Extra, Metric, Plan, Target, main

LMDB = ("py-lmdb", "py-lmdb 2 workers")
PLAIN = ("py-lmdb no readahead", "py-lmdb 2 workers no readahead")
NOT_GLOBAL = ("webdataset", "litdata", "sapwood ring")
"""Those that cannot, and the ring, which would read a chunk for almost every record."""
ONE_RANK = {
    "3kb": ("cold none", "cold shuffled", "cold global", "warm shuffled", "warm global"),
    "190kb": ("cold none", "cold shuffled", "warm global"),
}
MORE_RANKS = {"3kb": ("cold shuffled", "warm global"), "190kb": ("cold shuffled",)}


def sensible(case: Case) -> bool:
    """One rank in most orders; more of them as one trains."""
    chosen = ONE_RANK if case["ranks"] == 1 else MORE_RANKS
    return f"{case['cache']} {case['order']}" in chosen[case["records"]]


def taking_part(case: Case, names: Sequence[str]) -> list[str]:
    left_out = {"page cache" if case["cache"] == "cold" else "raw disk"}
    if case["order"] == "global":
        left_out |= {*NOT_GLOBAL}
    if case["cache"] == "warm":
        left_out |= {*PLAIN}  # there is nothing to read ahead
    return [name for name in names if name not in left_out]


class ReadSession(DataSession):
    def __init__(self, case: Case, names: Sequence[str], options: Mapping[str, Any]) -> None:
        super().__init__(case, taking_part(case, names), options)
        folder = Path(self.data.folder.name)
        if case["cache"] == "cold":
            self.extra.facts["the disk reads ahead"] = read_ahead(folder)

    def finish(self) -> Extra:
        """The index is of the file alone, so it is measured once for each."""
        case = (self.case["cache"], self.case["order"], self.case["ranks"])
        if case in (("cold", "shuffled", 1), ("cold", "shuffled", self.options["index_ranks"])):
            folder = Path(self.data.folder.name) / "lmdb"
            for name, seconds in index_seconds(folder).items():
                self.extra.samples.setdefault(name, {})["index"] = seconds
        return self.extra


CONTENDERS = (
    Contender(
        name="sapwood",
        role="ours",
        note="LmdbReader, policy auto: past the page cache if the file is not in it, but through "
        "it for a global shuffle; shuffled is the window shuffle of 64 MiB",
    ),
    Contender(
        name="sapwood ring",
        role="variant",
        note="the same, policy coal: what auto does with files larger than memory; O_DIRECT into "
        "a ring of 128 MiB for each rank",
    ),
    Contender(
        name="py-lmdb",
        role="peer",
        note="torch DataLoader, a lookup by key for each record, stacked to a tensor; shuffled is "
        "global",
    ),
    Contender(name="py-lmdb 2 workers", role="peer", note="two workers for each rank"),
    Contender(
        name="py-lmdb lean",
        role="peer",
        note="torch DataLoader, a batch in one transaction, left as a list of bytes",
    ),
    Contender(name="py-lmdb no readahead", role="peer", note="readahead=False"),
    Contender(
        name="py-lmdb 2 workers no readahead", role="peer", note="readahead=False, two workers"
    ),
    Contender(
        name="torchdata",
        role="peer",
        note="torchdata.nodes over the lookups of lean, 8 threads, in order; shuffled is global",
    ),
    Contender(
        name="spdl",
        role="peer",
        note="tar shards, 2 threads read whole ones, iter_tarfile; shuffled is by shards and "
        "inside of each; global is the lookups of lean by 8 threads",
    ),
    Contender(
        name="webdataset",
        role="peer",
        note="16 tar shards, divided among ranks, no workers (two were slower); shuffled is by "
        "shards and a buffer of 1000",
    ),
    Contender(
        name="litdata",
        role="peer",
        note="16 chunks, read where they are, no workers (two were slower); shuffled is by chunks "
        "and inside of each",
    ),
    Contender(
        name="grain",
        role="peer",
        note="ArrayRecord, group_size 1, uncompressed; batches looked up at once by 4 threads; "
        "shuffled is global",
    ),
    RAW_DISK,
    Contender(
        name="page cache",
        role="limit",
        note="the same reads from the page cache: each byte copied once; warm",
    ),
)
METRICS = (
    *COSTS,
    *TURNS,
    Metric(
        name="index",
        unit="s",
        digits=3,
        meaning="finding all records of the LMDB file, cold; py-lmdb by a cursor over its keys",
    ),
)


def of(**wanted: str) -> Any:
    return lambda case: all(case[axis] in values.split() for axis, values in wanted.items())


def faster(text: str, bound: float, than: Sequence[str], **cases: str) -> Target:
    """At least so many times as many records a second."""
    return Target(text=text, metric="rate", at="least", bound=bound, among=than, where=of(**cases))


COLD_3KB = {"records": "3kb", "cache": "cold"}
COLD_190KB = {"records": "190kb", "cache": "cold"}
TARGETS = (
    faster(
        "3 KB cold, shuffled: at least 15x py-lmdb + DataLoader, readahead=False",
        15,
        PLAIN,
        **COLD_3KB,
        order="shuffled global",
    ),
    faster(
        "3 KB cold, shuffled: at least 15x py-lmdb + DataLoader, any setting",
        15,
        (*LMDB, *PLAIN),
        **COLD_3KB,
        order="shuffled global",
    ),
    faster(
        "3 KB cold, none and shuffled: at least 70 % of the raw disk",
        0.7,
        ("raw disk",),
        **COLD_3KB,
        order="none shuffled",
    ),
    faster(
        "3 KB warm, global shuffle: at least 5x py-lmdb + DataLoader",
        5,
        LMDB,
        records="3kb",
        cache="warm",
        order="global",
    ),
    faster(
        "190 KB cold: at least 10x py-lmdb + DataLoader, readahead=False",
        10,
        PLAIN,
        **COLD_190KB,
    ),
    faster(
        "190 KB cold, none and shuffled: at least 70 % of the raw disk",
        0.7,
        ("raw disk",),
        **COLD_190KB,
        order="none shuffled",
    ),
    Target(text="ahead of every peer", metric="rate", at="least", bound=1),
    Target(
        text="through the ring: at most its 128 MiB and 64 MiB of batches for each rank",
        metric="memory",
        of="ours",
        contender="sapwood ring",
        at="most",
        bound=192,
    ),
    Target(
        text="index of 100k records, cold, in less than a second",
        metric="index",
        of="ours",
        at="most",
        bound=1,
        where=of(records="3kb"),
    ),
)
QUICK = Plan(
    axes={"records": ["3kb", "190kb"], "cache": ["cold", "warm"], "order": ["shuffled", "global"]}
    | {"ranks": 2},
    seconds_per_case=0,
    min_rounds=2,
    max_rounds=2,
    options={
        "sizes": QUICK_SIZES,
        "seconds": 1.0,
        "steady_seconds": 0.5,
        "timeout": 60,
        "index_ranks": 2,
    },
)
FULL = Plan(
    axes={
        "records": ["3kb", "190kb"],
        "cache": ["cold", "warm"],
        "order": ["none", "shuffled", "global"],
        "ranks": [1, 2, 4],
    },
    seconds_per_case=0,
    min_rounds=5,
    max_rounds=5,
    options={
        "sizes": FULL_SIZES,
        "seconds": 3.0,
        "steady_seconds": 1.0,
        "timeout": 120,
        "index_ranks": 1,
    },
)
BENCHMARK = Benchmark(
    name="data_read",
    question=__doc__.splitlines()[0],
    contenders=CONTENDERS,
    metrics=METRICS,
    targets=TARGETS,
    open=ReadSession,
    quick=QUICK,
    full=FULL,
    keep=sensible,
)

if __name__ == "__main__":
    sys.exit(main(BENCHMARK))
