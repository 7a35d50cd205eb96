from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time

import pytest

from sapwood import trace
from sapwood.errors import TraceError
from sapwood.trace.read import Instant, Span, read_trace


def test_off_records_nothing_and_shares_one_context_manager():
    assert trace.OFF.on is False
    assert trace.OFF.span("a", step=1) is trace.OFF.span("b", lane="comm")
    with trace.OFF.span("a"), trace.OFF.span("a"):
        trace.OFF.instant("b", name="an argument may be called name")
        trace.OFF.counter("c", 1)
        trace.OFF.complete("d", 1, 2, lane="comm")
    trace.OFF.flush()
    trace.OFF.close()


def test_importing_trace_does_not_import_torch():
    code = "import sapwood.trace.timeline, sys; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=30)


def test_header_is_written_at_once_and_records_in_batches(tmp_path):
    path = tmp_path / "trace" / "rank-3.jsonl"
    tracer = trace.open_trace(path, rank=3, world=8, run_id="r")
    header = json.loads(path.read_text())
    assert header["sapwood_trace"] == 1
    assert (header["rank"], header["world"], header["run"]) == (3, 8, "r")
    assert header["pid"] == os.getpid()
    assert abs(header["epoch_ns"] - time.time_ns()) < 60e9
    tracer.instant("x")
    assert len(path.read_text().splitlines()) == 1
    tracer.flush()
    assert len(path.read_text().splitlines()) == 2
    tracer.close()


def test_a_large_batch_is_written_without_flush(tmp_path):
    path = tmp_path / "rank-0.jsonl"
    tracer = trace.open_trace(path, rank=0, world=1, run_id="r")
    for i in range(5000):
        tracer.instant("x", i=i)
    assert len(path.read_text().splitlines()) > 1
    tracer.close()


def test_close_writes_the_rest_and_stops(tmp_path):
    tracer = trace.open_trace(tmp_path / "rank-0.jsonl", rank=0, world=1, run_id="r")
    assert tracer.on
    with tracer.span("forward", step=1):
        pass
    tracer.close()
    tracer.close()
    assert not tracer.on
    tracer.instant("late")
    tracer.flush()
    assert [r.name for r in read_trace(tmp_path).records] == ["forward"]


def test_a_span_that_raises_is_recorded_with_its_error(tmp_path):
    tracer = trace.open_trace(tmp_path / "rank-0.jsonl", rank=0, world=1, run_id="r")
    with pytest.raises(KeyError), tracer.span("forward"):
        raise KeyError
    tracer.close()
    (span,) = read_trace(tmp_path).records
    assert isinstance(span, Span)
    assert span.args == {"error": "KeyError"}


def test_arguments_json_does_not_know_become_numbers_or_text(tmp_path):
    class Scalar:
        def item(self):
            return 7

    tracer = trace.open_trace(tmp_path / "rank-0.jsonl", rank=0, world=1, run_id="r")
    tracer.instant("x", scalar=Scalar(), path=tmp_path, names=("a", "b"))
    tracer.close()
    (record,) = read_trace(tmp_path).records
    assert isinstance(record, Instant)
    assert record.args == {"scalar": 7, "path": str(tmp_path), "names": ["a", "b"]}


def test_threads_lose_no_record(tmp_path):
    tracer = trace.open_trace(tmp_path / "rank-0.jsonl", rank=0, world=1, run_id="r")

    def work(number):
        for i in range(1500):
            with tracer.span("s", lane=str(number), i=i):
                pass
            if i % 100 == 0:
                tracer.flush()

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    tracer.close()
    seen = {(r.lane, r.args["i"]) for r in read_trace(tmp_path).records}
    assert len(seen) == 4 * 1500


def test_a_forked_child_does_not_write_its_parents_records(tmp_path):
    code = textwrap.dedent("""
        import os, sys
        from sapwood import trace
        tracer = trace.open_trace(sys.argv[1], rank=0, world=1, run_id="r")
        tracer.instant("once")
        pid = os.fork()
        tracer.close()
        if pid:
            os.waitpid(pid, 0)
    """)
    path = tmp_path / "rank-0.jsonl"
    subprocess.run([sys.executable, "-c", code, str(path)], check=True, timeout=30)
    assert [r.name for r in read_trace(tmp_path).records] == ["once"]


def test_kill_nine_loses_at_most_the_last_batch(tmp_path):
    code = textwrap.dedent("""
        import sys
        from sapwood import trace
        tracer = trace.open_trace(sys.argv[1], rank=0, world=1, run_id="r")
        tracer.instant("first")
        tracer.flush()
        print("ready", flush=True)
        while True:
            tracer.instant("more", text="x" * 100)
            tracer.flush()
    """)
    command = [sys.executable, "-c", code, str(tmp_path / "rank-0.jsonl")]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        process.send_signal(signal.SIGKILL)
        process.wait(30)
    assert read_trace(tmp_path).records[0].name == "first"


def test_a_full_disk_ends_the_trace_and_not_the_training(tmp_path, caplog):
    tracer = trace.open_trace(tmp_path / "rank-0.jsonl", rank=0, world=1, run_id="r")
    os.close(tracer._file)
    tracer._file = os.open("/dev/full", os.O_WRONLY)
    tracer.instant("x")
    tracer.flush()
    assert not tracer.on
    assert "tracing stops" in caplog.text
    tracer.close()


def test_a_folder_that_cannot_be_made_says_what_to_do(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(TraceError, match="turn tracing off"):
        trace.open_trace(tmp_path / "file" / "rank-0.jsonl", rank=0, world=1, run_id="r")
