"""How the data benchmarks make cold files, look at memory, and tell wrong records from right."""

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.contenders import data_cold, data_memory
from benchmarks.contenders.data_costs import policy_metrics, read_metrics, wrong_records
from benchmarks.contenders.data_formats import digest_of, records_of
from tests.benchmarks.sessions import measure

ROOT = Path(__file__).resolve().parents[2]
MIB = 2**20


def answer(samples: int, **changes: object) -> dict:
    times = {"seconds": 2.0, "first": 0.5, "cpu": 3.0, "digest": 0, "facts": {}}
    return {"samples": samples, **times, **changes}


def test_a_group_is_as_slow_as_its_slowest_rank() -> None:
    both = [answer(3000), answer(1000, seconds=4.0, first=0.75, cpu=9.0)]
    assert read_metrics(both, nbytes=1000, count=8000) == pytest.approx(
        {"rate": 1.0, "bytes": 1.0, "cpu": 750, "first": 750, "part": 50}
    )


def test_what_our_reader_counted_is_of_all_ranks() -> None:
    facts = {"read": 2 * MIB, "useful": MIB, "requests": 4, "wait": 0.5, "stagger": 0.25}
    facts |= {"missed": 64, "redundant": 0, "score": 0.5}
    found = policy_metrics([answer(1, facts=facts), answer(1, facts=facts)])
    assert found == pytest.approx(
        {"read": 2, "request": 512, "wait": 25, "stagger": 12.5, "missed": 25, "score": 0.5}
    )
    assert policy_metrics([answer(1)]) == {}


def test_a_missing_repeated_or_changed_record_is_noticed() -> None:
    records = list(records_of(50, 100))
    wanted = {"count": 50, "digest": digest_of(records)}

    def verdict(got: list[bytes]) -> list[str]:
        halves = got[:20], got[20:]
        answers = [answer(len(half), digest=digest_of(half)) for half in halves]
        return wrong_records("x", answers, **wanted)

    random.Random(0).shuffle(records)
    assert verdict(records) == []
    assert verdict(records[1:]) == ["x: 49 records instead of 50"]
    differs = ["x: the sum of the records' checksums differs"]
    assert verdict([records[1], *records[1:]]) == differs
    assert verdict([bytes(100), *records[1:]]) == differs


def test_files_can_be_made_cold_and_warm(tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "file").write_bytes(os.urandom(MIB))
    (tmp_path / "empty").touch()
    if data_cold.drop(tmp_path):
        pytest.skip("this file system keeps all files in memory")
    assert data_cold.resident(tmp_path / "inner" / "file") == 0
    assert data_cold.fill(tmp_path) == 1
    assert data_cold.resident(tmp_path / "inner" / "file") == 1


def test_memory_of_a_child_is_counted() -> None:
    child = "held = bytearray(b'1') * (64 << 20); print(flush=True); input()"
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    parent = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        peak = data_memory.Peak(os.getpid())
        assert parent.stdout is not None
        parent.stdout.readline()
        peak.look()
        assert len(data_memory.family(parent.pid)) == 2
        assert peak.grown > 64 * MIB
    finally:
        parent.communicate(b"\n", timeout=20)


def test_records_are_read_checked_and_measured() -> None:
    names = ["sapwood", "py-lmdb 2 workers", "page cache"]
    case = {"records": "small", "cache": "warm", "order": "shuffled", "ranks": 1}
    options = {"sizes": {"small": {"count": 500, "nbytes": 3072, "batch": 64}}}
    options |= {"seconds": 9.0, "steady_seconds": 0.3, "timeout": 80}
    measured, extra = measure("data_session", "DataSession", case, names, options)
    assert extra["facts"] == {}
    assert set(extra["samples"]) == {"sapwood", "py-lmdb 2 workers"}
    assert measured["page cache"]["part"] % 100 == 0  # whole epochs, as it gives no less
    for found in measured.values():
        assert found["part"] > 0
        assert found["rate"] > 0
