"""Reading a run's trace folder into typed records on one clock."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sapwood.errors import TraceError
from sapwood.regular import open_regular
from sapwood.trace.tracer import FORMAT

__all__ = ["Counter", "Header", "Instant", "Record", "Span", "Trace", "read_trace"]

_SAME_CLOCK_NS = 100_000_000
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """Who wrote a file, and one moment on both of its clocks."""

    run: str
    rank: int
    world: int
    host: str
    pid: int
    epoch_ns: int
    perf_ns: int

    @property
    def offset(self) -> int:
        """What to add to this process's perf_counter_ns to get nanoseconds since the epoch."""
        return self.epoch_ns - self.perf_ns


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Something that took time; times are nanoseconds since `Trace.origin_ns`."""

    rank: int
    lane: str
    name: str
    start: int
    end: int
    args: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Instant:
    """Something that happened at one moment."""

    rank: int
    lane: str
    name: str
    start: int
    args: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Counter:
    """The value of a quantity at one moment."""

    rank: int
    lane: str
    name: str
    start: int
    value: float


Record = Span | Instant | Counter


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """All records of a run, ordered by start, aligned to one clock."""

    run: str
    world: int
    origin_ns: int
    headers: tuple[Header, ...]
    records: tuple[Record, ...]
    skipped: tuple[str, ...] = ()
    """What could not be read and was left out, one sentence each."""

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that wrote something, in order."""
        return tuple(sorted({header.rank for header in self.headers}))


_Raw = tuple[Header, dict[str, Any]]


def read_trace(folder: str | os.PathLike[str]) -> Trace:
    """Read every ``rank-*.jsonl`` of a trace folder.

    A torn line left by a killed process is skipped, logged as a warning and listed in
    `Trace.skipped`.

    Raises:
        TraceError: There is no trace, or a file holds something that is not a trace record.
    """
    paths = sorted(Path(folder).glob("rank-*.jsonl"))
    if not paths:
        raise TraceError(
            f"no rank-*.jsonl in {os.fspath(folder)}; was the run started with trace=True?"
        )
    skipped: list[str] = []
    raw = [pair for path in paths for pair in _read_file(path, skipped)]
    headers = tuple(dict.fromkeys(header for header, _ in raw))
    if not headers:
        raise TraceError(f"every trace file in {os.fspath(folder)} is empty")
    for sentence in skipped:
        _log.warning("%s", sentence)
    offsets = _shared_offsets(headers)
    times = [fields["t"] + offsets[header] for header, fields in raw if "t" in fields]
    origin = min(times, default=min(header.epoch_ns for header in headers))
    records = [_typed(h, fields, offsets[h] - origin) for h, fields in raw if "t" in fields]
    return Trace(
        run=headers[0].run,
        world=max(header.world for header in headers),
        origin_ns=origin,
        headers=headers,
        records=tuple(sorted(records, key=lambda record: record.start)),
        skipped=tuple(skipped),
    )


def _read_file(path: Path, skipped: list[str]) -> Iterator[_Raw]:
    """Pairs of header and raw record; a header without records comes with an empty dict."""
    header: Header | None = None
    torn: int | None = None
    line = b""
    for number, line in enumerate(_lines(path), start=1):
        fields = _parse(line)
        if fields is not None and "sapwood_trace" in fields:
            if torn is not None:
                skipped.append(f"{path}:{torn}: torn line skipped (its process was killed)")
                torn = None
            header = _header(fields, path, number)
            yield header, {}
        elif torn is not None:
            raise _not_a_record(path, torn)
        elif fields is None:
            torn = number
        elif header is not None and _is_record(fields):
            yield header, fields
        else:
            raise _not_a_record(path, number)
    if torn is not None:
        if line.endswith(b"\n"):
            raise _not_a_record(path, torn)
        skipped.append(f"{path}:{torn}: torn last line skipped (its process was killed)")


def _lines(path: Path) -> Iterator[bytes]:
    try:
        with os.fdopen(open_regular(path), "rb") as file:
            yield from file
    except OSError as error:
        raise TraceError(f"cannot read the trace file {path}: {error.strerror}") from error


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        fields = json.loads(line)
    except ValueError:
        return None
    # Half of a line can be valid JSON by accident, but never an object with its newline.
    return fields if isinstance(fields, dict) and line.endswith(b"\n") else None


def _is_record(fields: dict[str, Any]) -> bool:
    numbers_ok = all(type(fields[key]) is int for key in ("t", "d") if key in fields)
    value_ok = isinstance(fields.get("v", 0.0), int | float)
    args_ok = isinstance(fields.get("a", {}), dict)
    texts_ok = isinstance(fields.get("n"), str) and isinstance(fields.get("l"), str)
    return "t" in fields and numbers_ok and value_ok and args_ok and texts_ok


def _not_a_record(path: Path, number: int) -> TraceError:
    return TraceError(
        f"{path}:{number}: this is not a trace record; the file was changed or damaged "
        "(only the last line a killed process wrote may be torn)"
    )


def _header(fields: dict[str, Any], path: Path, number: int) -> Header:
    version = fields["sapwood_trace"]
    if version != FORMAT:
        raise TraceError(
            f"{path}:{number}: trace format {version}, this Sapwood reads format {FORMAT}; "
            "read it with the version of Sapwood that wrote it"
        )
    try:
        return Header(
            run=str(fields["run"]),
            rank=int(fields["rank"]),
            world=int(fields["world"]),
            host=str(fields["host"]),
            pid=int(fields["pid"]),
            epoch_ns=int(fields["epoch_ns"]),
            perf_ns=int(fields["perf_ns"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise TraceError(f"{path}:{number}: damaged trace header: {error!r}") from error


def _shared_offsets(headers: tuple[Header, ...]) -> dict[Header, int]:
    """One offset per boot of a host.

    Processes of one boot share perf_counter exactly, so their order must not be blurred by how well
    each of them read its pair of clocks. After a reboot the offset differs by far more.
    """
    known: dict[str, list[int]] = {}
    offsets: dict[Header, int] = {}
    for header in sorted(headers, key=lambda header: header.rank):
        of_host = known.setdefault(header.host, [])
        near = [o for o in of_host if abs(o - header.offset) < _SAME_CLOCK_NS]
        if not near:
            of_host.append(header.offset)
        offsets[header] = near[0] if near else header.offset
    return offsets


def _typed(header: Header, fields: dict[str, Any], shift: int) -> Record:
    rank, lane, name = header.rank, fields["l"], fields["n"]
    start = fields["t"] + shift
    args = fields.get("a", {})
    if "d" in fields:
        return Span(
            rank=rank, lane=lane, name=name, start=start, end=start + fields["d"], args=args
        )
    if "v" in fields:
        return Counter(rank=rank, lane=lane, name=name, start=start, value=fields["v"])
    return Instant(rank=rank, lane=lane, name=name, start=start, args=args)
