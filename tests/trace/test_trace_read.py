from __future__ import annotations

import json

import pytest

from sapwood import trace
from sapwood.errors import TraceError
from sapwood.trace.read import Counter, Instant, Span, read_trace


def write(path, *lines, torn=""):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + torn)


def header(rank=0, host="a", epoch=0, perf=0, **more):
    return {
        "sapwood_trace": 1,
        "run": "r",
        "rank": rank,
        "world": 2,
        "host": host,
        "pid": 1,
        "epoch_ns": epoch,
        "perf_ns": perf,
        **more,
    }


def test_records_come_back_typed_and_in_order(tmp_path):
    write(
        tmp_path / "rank-0.jsonl",
        header(),
        {"n": "loss", "l": "main", "t": 30, "v": 0.5},
        {"n": "forward", "l": "main", "t": 10, "d": 5, "a": {"step": 1}},
        {"n": "step_ended", "l": "main", "t": 20},
    )
    read = read_trace(tmp_path)
    assert read.ranks == (0,)
    assert read.world == 2
    assert read.origin_ns == 10
    assert read.records == (
        Span(rank=0, lane="main", name="forward", start=0, end=5, args={"step": 1}),
        Instant(rank=0, lane="main", name="step_ended", start=10),
        Counter(rank=0, lane="main", name="loss", start=20, value=0.5),
    )


def test_hosts_are_aligned_by_the_epoch(tmp_path):
    record = {"n": "x", "l": "main", "t": 1000}
    write(tmp_path / "rank-0.jsonl", header(0, "a", epoch=10**18, perf=500), record)
    write(tmp_path / "rank-1.jsonl", header(1, "b", epoch=10**18 + 7, perf=900), record)
    times = {r.rank: r.start for r in read_trace(tmp_path).records}
    assert times[0] - times[1] == 393


def test_processes_of_one_host_share_one_offset(tmp_path):
    record = {"n": "x", "l": "main", "t": 1000}
    write(tmp_path / "rank-0.jsonl", header(0, epoch=10**18, perf=500), record)
    write(tmp_path / "rank-1.jsonl", header(1, epoch=10**18 + 2000, perf=700), record)
    assert [r.start for r in read_trace(tmp_path).records] == [0, 0]


def test_a_torn_last_line_is_skipped_with_a_warning(tmp_path, caplog):
    record = {"n": "x", "l": "main", "t": 1}
    write(tmp_path / "rank-0.jsonl", header(), record, torn='{"n":"y","l":"ma')
    read = read_trace(tmp_path)
    assert len(read.records) == 1
    assert "rank-0.jsonl:3" in read.skipped[0]
    assert "torn last line" in caplog.text


def test_a_file_continued_after_a_kill_is_read_whole(tmp_path):
    path = tmp_path / "rank-0.jsonl"
    write(path, header(), {"n": "before", "l": "main", "t": 1}, torn='{"n":"to')
    tracer = trace.open_trace(path, rank=0, world=2, run_id="r")
    tracer.instant("after")
    tracer.close()
    read = read_trace(tmp_path)
    assert {r.name for r in read.records} == {"before", "after"}
    assert len(read.headers) == 2
    assert len(read.skipped) == 1


@pytest.mark.parametrize(
    "bad",
    [
        "not json",
        "[1, 2]",
        '{"n": "x", "l": "main", "t": "soon"}',
        '{"n": "x", "l": 3, "t": 1}',
        '{"n": "x", "l": "main", "t": 1, "a": 3}',
        '{"l": "main"}',
    ],
)
def test_damage_in_the_middle_names_file_and_line(tmp_path, bad):
    path = tmp_path / "rank-0.jsonl"
    write(path, header(), torn=bad + "\n" + '{"n":"x","l":"main","t":1}\n')
    with pytest.raises(TraceError, match=r"rank-0\.jsonl:2"):
        read_trace(tmp_path)


def test_a_foreign_last_line_is_not_taken_for_a_torn_one(tmp_path):
    write(tmp_path / "rank-0.jsonl", header(), torn="not json\n")
    with pytest.raises(TraceError, match=r"rank-0\.jsonl:2"):
        read_trace(tmp_path)


def test_a_record_before_any_header_is_refused(tmp_path):
    write(tmp_path / "rank-0.jsonl", {"n": "x", "l": "main", "t": 1})
    with pytest.raises(TraceError, match=r"rank-0\.jsonl:1"):
        read_trace(tmp_path)


def test_a_newer_format_is_refused_with_the_remedy(tmp_path):
    write(tmp_path / "rank-0.jsonl", header(sapwood_trace=99))
    with pytest.raises(TraceError, match="the version of Sapwood that wrote it"):
        read_trace(tmp_path)


def test_a_damaged_header_is_named(tmp_path):
    write(tmp_path / "rank-0.jsonl", {"sapwood_trace": 1, "run": "r"})
    with pytest.raises(TraceError, match="damaged trace header"):
        read_trace(tmp_path)


def test_no_trace_asks_whether_tracing_was_on(tmp_path):
    with pytest.raises(TraceError, match="trace=True"):
        read_trace(tmp_path)


def test_only_empty_files(tmp_path):
    (tmp_path / "rank-0.jsonl").write_text("")
    with pytest.raises(TraceError, match="empty"):
        read_trace(tmp_path)
