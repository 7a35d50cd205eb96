"""Chrome trace JSON, which Perfetto (ui.perfetto.dev) and chrome://tracing open."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from sapwood.trace.read import Counter, Instant, Record, Span, Trace
from sapwood.trace.steps import pack_rows

__all__ = ["to_chrome"]

Event = dict[str, Any]
_Place = tuple[int, int]


def to_chrome(trace: Trace) -> dict[str, Any]:
    """Turn a trace into a Chrome trace document, ready for ``json.dump``.

    A rank is a process and a lane a thread; spans of a lane that overlap without nesting get
    another thread, because viewers drop them otherwise. An ``update`` span with an argument
    ``flow`` gets an arrow to every other record that carries the same ``flow``.
    """
    threads = _Threads()
    places = _place_spans(trace.records, threads)
    events = [_event(record, places, threads) for record in trace.records]
    shown = [event for event in events if event is not None]
    arrows = _arrows(trace.records, places, threads)
    return {
        "traceEvents": [*threads.metadata(), *shown, *arrows],
        "displayTimeUnit": "ms",
        "otherData": {"run": trace.run, "world": trace.world, "origin_ns": trace.origin_ns},
    }


class _Threads:
    """Numbers for (rank, lane, row), given out in order of first use."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[int, str, int], int] = {}

    def number(self, rank: int, lane: str, row: int = 0) -> int:
        return self._numbers.setdefault((rank, lane, row), len(self._numbers) + 1)

    def metadata(self) -> list[Event]:
        events = []
        for rank in sorted({rank for rank, _, _ in self._numbers}):
            events.append(_meta("process_name", rank, 0, name=f"rank {rank}"))
            events.append(_meta("process_sort_index", rank, 0, sort_index=rank))
        for (rank, lane, row), number in self._numbers.items():
            name = lane if row == 0 else f"{lane} ({row + 1})"
            events.append(_meta("thread_name", rank, number, name=name))
            events.append(_meta("thread_sort_index", rank, number, sort_index=number))
        return events


def _meta(name: str, pid: int, tid: int, /, **args: object) -> Event:
    return {"ph": "M", "name": name, "pid": pid, "tid": tid, "args": args}


def _place_spans(records: Iterable[Record], threads: _Threads) -> dict[int, int]:
    """Thread number of every span, by identity of the record."""
    by_lane: dict[tuple[int, str], list[Span]] = {}
    for record in records:
        if isinstance(record, Span):
            by_lane.setdefault((record.rank, record.lane), []).append(record)
    places = {}
    for (rank, lane), spans in by_lane.items():
        for index, row in enumerate(pack_rows(spans, nested=True)):
            for span in row:
                places[id(span)] = threads.number(rank, lane, index)
    return places


def _event(record: Record, places: Mapping[int, int], threads: _Threads) -> Event | None:
    event: Event = {"name": record.name, "pid": record.rank, "ts": record.start / 1000}
    if isinstance(record, Counter):
        if not math.isfinite(record.value):
            return None  # JSON has no NaN, and viewers refuse the whole file for one
        return {**event, "ph": "C", "args": {record.name: record.value}}
    event |= {"cat": record.lane, "args": _finite(record.args)}
    if isinstance(record, Span):
        duration = (record.end - record.start) / 1000
        return {**event, "ph": "X", "tid": places[id(record)], "dur": duration}
    return {**event, "ph": "i", "s": "t", "tid": threads.number(record.rank, record.lane)}


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _arrows(records: Iterable[Record], places: Mapping[int, int], threads: _Threads) -> list[Event]:
    sources: dict[Any, Span] = {}
    targets: list[tuple[Any, Span | Instant]] = []
    for record in records:
        flow = None if isinstance(record, Counter) else record.args.get("flow")
        if flow is None or isinstance(flow, list | dict) or isinstance(record, Counter):
            continue
        if isinstance(record, Span) and record.name == "update":
            sources[flow] = record
        else:
            targets.append((flow, record))
    arrows: list[Event] = []
    for number, (flow, target) in enumerate(targets, start=1):
        if flow in sources:
            source = sources[flow]
            arrows.append(_arrow_end("s", number, source, places[id(source)]))
            tid = places.get(id(target)) or threads.number(target.rank, target.lane)
            arrows.append({**_arrow_end("f", number, target, tid), "bp": "e"})
    return arrows


def _arrow_end(phase: str, number: int, record: Span | Instant, tid: int) -> Event:
    return {
        "ph": phase,
        "id": number,
        "name": "flow",
        "cat": "flow",
        "pid": record.rank,
        "tid": tid,
        "ts": record.start / 1000,
    }
