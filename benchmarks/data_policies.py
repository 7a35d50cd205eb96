"""What does each step of the LMDBIO paper bring to reading, and what does a shuffle cost?

python benchmarks/data_policies.py --quick
python benchmarks/data_policies.py --full --case records=3kb --case order=none
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from contenders.data_costs import Answers, policy_metrics
from contenders.data_session import DataSession
from contenders.data_terms import COSTS, FULL_SIZES, QUICK_SIZES, RAW_DISK, TURNS
from core import Benchmark, Case, Contender, Metric, Plan, Target, main

STEPS = ("auto", "lmdb", "lmm", "lmm-dm", "dio", "prov", "coal", "stag", "raw disk")
SHARED = "auto, shared"
SHUFFLING = {
    "none": STEPS,
    "window": ("auto", "lmdb", "dio", "coal", "raw disk"),
    "reuse": ("auto", "lmdb", "dio", "coal", "raw disk"),
    # Chunks would be read anew for almost every record.
    "global": ("auto", "lmdb", "dio", "raw disk"),
}


def sensible(case: Case) -> bool:
    """Steps in the order of keys, as in the paper; shuffles with one rank and small records."""
    return case["order"] == "none" or (case["ranks"] == 1 and case["records"] == "3kb")


class PolicySession(DataSession):
    def __init__(self, case: Case, names: Sequence[str], options: Mapping[str, Any]) -> None:
        chosen = SHUFFLING[case["order"]] + ((SHARED,) if case["ranks"] > 1 else ())
        super().__init__(case, [name for name in names if name in chosen], options)

    def metrics(self, answers: Answers) -> dict[str, float]:
        return super().metrics(answers) | policy_metrics(answers)


NOTES = {
    "auto": "what the reader chooses; these files fit into memory",
    SHARED: "the same, but one rank reads for the others",
    "lmdb": "each rank a py-lmdb cursor, and steps over the records of the others",
    "lmm": "one rank has the cursor, the others get records through shared memory",
    "lmm-dm": "one rank reads ahead the pages it guesses; in the order of keys only",
    "dio": "an explicit read for each record, where the index says",
    "prov": "the same, where provenance says",
    "coal": "chunks of 1 MiB with O_DIRECT into a ring of 128 MiB for each rank",
    "stag": "the same, two ranks at a time, adapted; tokens in the group's store",
}
ROLES: dict[str, Any] = {"auto": "ours", "lmdb": "peer"}
CONTENDERS = (
    *(
        Contender(name=name, role=ROLES.get(name, "variant"), note=note)
        for name, note in NOTES.items()
    ),
    RAW_DISK,
)
METRICS = (
    *COSTS,
    Metric(name="read", unit="x", digits=2, meaning="bytes asked of the file for each of records"),
    Metric(
        name="request", unit="KiB", digits=0, better="higher", meaning="of the file, on average"
    ),
    Metric(name="wait", unit="%", digits=0, meaning="of the time, for a batch not read yet"),
    Metric(name="stagger", unit="%", digits=0, meaning="of the time, for one's turn to read"),
    Metric(name="missed", unit="%", meaning="pages that were not guessed, of those needed"),
    Metric(name="redundant", unit="%", meaning="pages that were guessed in vain, of those needed"),
    Metric(name="score", unit="", digits=3, better="higher", meaning="of the shuffle, 1 is global"),
    *TURNS,
)
TARGETS = (
    Target(text="auto ahead of the cursor", metric="rate", at="least", bound=1),
    Target(
        text="chunks: at most the ring of 128 MiB and 64 MiB of batches for each rank",
        metric="memory",
        of="ours",
        contender="coal",
        at="most",
        bound=192,
    ),
)
REUSED = {"reuse": 2}
QUICK = Plan(
    axes={"records": ["3kb", "190kb"], "cache": "cold", "order": ["none", "window", "reuse"]}
    | {"ranks": [1, 2]},
    seconds_per_case=0,
    min_rounds=2,
    max_rounds=2,
    options={
        "sizes": QUICK_SIZES,
        "seconds": 0.7,
        "steady_seconds": 0.5,
        "timeout": 60,
        "times": REUSED,
    },
)
FULL = Plan(
    axes={
        "records": ["3kb", "190kb"],
        "cache": "cold",
        "order": ["none", "window", "global", "reuse"],
        "ranks": [1, 2, 4],
    },
    seconds_per_case=0,
    min_rounds=3,
    max_rounds=3,
    options={
        "sizes": FULL_SIZES,
        "seconds": 2.0,
        "steady_seconds": 1.0,
        "timeout": 120,
        "times": REUSED,
    },
)
BENCHMARK = Benchmark(
    name="data_policies",
    question=__doc__.splitlines()[0],
    contenders=CONTENDERS,
    metrics=METRICS,
    targets=TARGETS,
    open=PolicySession,
    quick=QUICK,
    full=FULL,
    keep=sensible,
)

if __name__ == "__main__":
    sys.exit(main(BENCHMARK))
