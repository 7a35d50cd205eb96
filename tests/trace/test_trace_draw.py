from __future__ import annotations

import json
import math
from xml.etree import ElementTree

import pytest

from sapwood.errors import TraceError
from sapwood.trace import open_trace
from sapwood.trace.perfetto import to_chrome
from sapwood.trace.read import Span, read_trace
from sapwood.trace.steps import late_step, pack_rows, step_view, steps_of
from sapwood.trace.summary import early_updates, summarise
from sapwood.trace.timeline import timeline_svg, timeline_text
from tests.trace.example import write_example


@pytest.fixture
def example(tmp_path):
    write_example(tmp_path)
    return read_trace(tmp_path)


def span(start, end, name="s", lane="main", **args):
    return Span(rank=0, lane=lane, name=name, start=start, end=end, args=args)


def test_the_default_step_is_one_that_every_rank_ended(example):
    assert steps_of(example) == (0, 1, 2)
    assert late_step(example) in (1, 2)


def test_the_default_step_is_the_median_of_the_late_ones(tmp_path):
    tracer = open_trace(tmp_path / "rank-0.jsonl", rank=0, world=1, run_id="r")
    for step, length in enumerate([900, 900, 900, 50, 20, 30]):
        tracer.complete("forward", step * 1000, step * 1000 + length, step=step)
    tracer.close()
    assert late_step(read_trace(tmp_path)) == 5


def test_many_overlapping_spans_become_one_row_of_the_oldest(tmp_path):
    tracer = open_trace(tmp_path / "rank-0.jsonl", rank=0, world=1, run_id="r")
    for bucket in range(4):
        tracer.complete("reduce", bucket, 10 + bucket, lane="comm", step=1, bucket=bucket)
    tracer.close()
    (lane,) = step_view(read_trace(tmp_path)).lanes
    (row,) = lane.rows
    assert [(s.start, s.end) for s in row] == [(0, 10), (10, 11), (11, 12), (12, 13)]


def test_an_unknown_step_says_which_there_are(example):
    with pytest.raises(TraceError, match="it has steps 0 to 2"):
        step_view(example, 9)


def test_text_shows_each_lane_of_each_rank_within_the_width(example):
    text = timeline_text(example, 1, width=80)
    lines = text.splitlines()
    assert all(len(line) <= 80 for line in lines[:-1])
    mains = [line for line in lines if " main " in line]
    assert [line[:6] for line in mains] == ["rank 0", "rank 1"]
    drawn = mains[0].split("main", 1)[1]
    assert "".join(dict.fromkeys(drawn.replace(" ", ""))) == "FBw"
    comm = next(line for line in lines if " comm " in line)
    assert "".join(dict.fromkeys(comm.split("comm")[1].replace(" ", ""))) == "0123"
    assert any("^" in line for line in lines[1:-1])


def test_text_of_a_narrow_terminal_still_shows_every_bucket_row(example):
    assert "F" in timeline_text(example, 1, width=5)


def test_overlapping_spans_go_to_rows_of_their_own():
    a, b, c = span(0, 10), span(5, 15), span(10, 20)
    assert pack_rows([a, b, c]) == ((a, c), (b,))


def test_nested_spans_share_a_row_only_when_asked():
    outer, inner, across = span(0, 10), span(2, 5), span(8, 12)
    assert pack_rows([outer, inner]) == ((outer,), (inner,))
    assert pack_rows([outer, inner, across], nested=True) == ((outer, inner), (across,))


def test_svg_is_well_formed_and_names_the_ranks(example):
    svg = timeline_svg(example, 1, title="A <b> & c")
    root = ElementTree.fromstring(svg)
    assert root.tag.endswith("svg")
    texts = {element.text for element in root.iter() if element.tag.endswith("text")}
    assert {"rank 0", "rank 1", "main", "comm", "update", "A <b> & c"} <= texts


def test_chrome_events_have_names_for_ranks_and_lanes(example):
    document = to_chrome(example)
    events = document["traceEvents"]
    names = {(e["pid"], e["args"]["name"]) for e in events if e["name"] == "process_name"}
    assert names == {(0, "rank 0"), (1, "rank 1")}
    lanes = {e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert lanes == {"main", "comm", "update"}
    forward = next(e for e in events if e["name"] == "forward")
    assert forward["ph"] == "X"
    assert forward["dur"] == 3000.0
    assert {e["ph"] for e in events} == {"M", "X", "i", "C"}
    json.dumps(document, allow_nan=False)


def test_chrome_arrows_go_from_the_update_to_what_carries_its_flow(tmp_path):
    tracer = open_trace(tmp_path / "rank-0.jsonl", rank=0, world=1, run_id="r")
    tracer.complete("update", 1000, 2000, lane="update", flow="3/0")
    tracer.complete("capture", 3000, 4000, lane="capture", flow="3/0")
    tracer.instant("persisted", lane="disk", flow="3/0")
    tracer.instant("unrelated", flow="no such update")
    tracer.close()
    events = to_chrome(read_trace(tmp_path))["traceEvents"]
    starts = [e for e in events if e["ph"] == "s"]
    ends = [e for e in events if e["ph"] == "f"]
    assert [e["id"] for e in starts] == [e["id"] for e in ends] == [1, 2]
    assert {e["ts"] for e in starts} == {0.0}


def test_chrome_leaves_out_what_json_cannot_hold(tmp_path):
    tracer = open_trace(tmp_path / "rank-0.jsonl", rank=0, world=1, run_id="r")
    tracer.counter("loss", math.nan)
    tracer.instant("x", value=math.inf, nested=[math.nan, 1.0])
    tracer.close()
    document = to_chrome(read_trace(tmp_path))
    json.dumps(document, allow_nan=False)
    assert [e["ph"] for e in document["traceEvents"] if e["ph"] != "M"] == ["i"]


def test_chrome_moves_spans_that_cross_to_another_thread(tmp_path):
    tracer = open_trace(tmp_path / "rank-0.jsonl", rank=0, world=1, run_id="r")
    tracer.complete("reduce", 0, 10, lane="comm")
    tracer.complete("reduce", 5, 15, lane="comm")
    tracer.close()
    events = to_chrome(read_trace(tmp_path))["traceEvents"]
    assert len({e["tid"] for e in events if e["ph"] == "X"}) == 2
    assert "comm (2)" in {e["args"].get("name") for e in events if e["ph"] == "M"}


def test_summary_counts_what_the_example_contains(example):
    first, second = summarise(example)
    assert (first.rank, second.rank) == (0, 1)
    assert first.steps == 3
    assert first.step_ms == pytest.approx(10)
    assert first.wait_ms == pytest.approx(1.0)
    assert first.reduces == 4
    assert first.early == pytest.approx(0.75)
    assert early_updates(example, rank=0, step=1) == (3, 4)


def test_summary_of_a_trace_without_steps_has_no_numbers(tmp_path):
    tracer = open_trace(tmp_path / "rank-0.jsonl", rank=0, world=1, run_id="r")
    tracer.close()
    (only,) = summarise(read_trace(tmp_path))
    assert (only.steps, only.step_ms, only.wait_ms, only.reduces, only.early) == (
        0,
        None,
        None,
        None,
        None,
    )
    with pytest.raises(TraceError, match="has no step"):
        step_view(read_trace(tmp_path))
