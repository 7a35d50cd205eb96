"""Recording: the `Tracer` everybody calls, the one that does nothing, and the one that writes."""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
from collections import deque
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from time import perf_counter_ns, time_ns
from types import TracebackType
from typing import Any

from sapwood.errors import TraceError
from sapwood.regular import open_regular

__all__ = ["FORMAT", "OFF", "FileTracer", "Tracer", "open_trace"]

FORMAT = 1
"""Version of the file format; a reader refuses a newer one."""

_BATCH = 2048
_NOTHING: AbstractContextManager[None] = nullcontext()
_log = logging.getLogger(__name__)


class Tracer:
    """The contract, and the tracer that does nothing (`sapwood.trace.OFF`).

    Times are those of ``time.perf_counter_ns``. A lane is a row of the drawing: what is on one lane
    is meant to be read from left to right.

    Example:
        with tracer.span("forward", step=3):
            loss = model(x)
    """

    on: bool = False
    """Whether anything is recorded; ask it before computing an argument that costs something."""

    def span(self, name: str, /, lane: str = "main", **args: Any) -> AbstractContextManager[object]:
        """Record how long the body of a ``with`` takes."""
        return _NOTHING

    def instant(self, name: str, /, lane: str = "main", **args: Any) -> None:
        """Record that something happened now."""

    def counter(self, name: str, value: float, lane: str = "main") -> None:
        """Record the present value of a quantity."""

    def complete(
        self, name: str, /, start_ns: int, end_ns: int, lane: str = "main", **args: Any
    ) -> None:
        """Record a span that the caller measured itself with ``time.perf_counter_ns``."""

    def flush(self) -> None:
        """Write what has been recorded so far."""

    def close(self) -> None:
        """Flush and stop recording; closing twice is harmless."""


OFF = Tracer()
"""The shared tracer that does nothing."""


class _Span:
    """One running span; two clock reads and one append."""

    __slots__ = ("_args", "_lane", "_name", "_pending", "_start")

    def __init__(
        self, pending: deque[_Pending], name: str, lane: str, args: dict[str, Any]
    ) -> None:
        self._pending = pending
        self._name = name
        self._lane = lane
        self._args = args

    def __enter__(self) -> None:
        self._start = perf_counter_ns()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        end = perf_counter_ns()
        if kind is not None:
            self._args["error"] = kind.__name__
        self._pending.append((self._name, self._lane, self._start, end, None, self._args))


_Pending = tuple[str, str, int, int | None, float | None, dict[str, Any] | None]
"""Name, lane, time, end (spans only), value (counters only), arguments."""


class FileTracer(Tracer):
    """Appends records to a file in batches; made by `open_trace`.

    Any thread may record. Recording only appends to a queue; lines are formatted when a batch is
    written, with one ``write`` per batch, so that a killed process leaves at most one torn line.
    """

    def __init__(self, path: Path, header: dict[str, object]) -> None:
        """Create or continue the file at ``path`` and write the header at once."""
        self._path = path
        self._pid = os.getpid()
        self._pending: deque[_Pending] = deque()
        self._writing = threading.Lock()
        self._file: int | None = _open_for_append(path)
        self.on = True
        self._write(_line(header))

    def span(self, name: str, /, lane: str = "main", **args: Any) -> AbstractContextManager[object]:
        """Record how long the body of a ``with`` takes."""
        self._keep_small()
        return _Span(self._pending, name, lane, args)

    def instant(self, name: str, /, lane: str = "main", **args: Any) -> None:
        """Record that something happened now."""
        self._pending.append((name, lane, perf_counter_ns(), None, None, args))
        self._keep_small()

    def counter(self, name: str, value: float, lane: str = "main") -> None:
        """Record the present value of a quantity."""
        self._pending.append((name, lane, perf_counter_ns(), None, value, None))
        self._keep_small()

    def complete(
        self, name: str, /, start_ns: int, end_ns: int, lane: str = "main", **args: Any
    ) -> None:
        """Record a span that the caller measured itself with ``time.perf_counter_ns``."""
        self._pending.append((name, lane, start_ns, end_ns, None, args))
        self._keep_small()

    def flush(self) -> None:
        """Write what has been recorded so far."""
        with self._writing:
            lines = []
            # popleft one by one: other threads may append meanwhile, and no record may be lost.
            for _ in range(len(self._pending)):
                lines.append(_record_line(self._pending.popleft()))
            if lines:
                self._write(b"".join(lines))

    def close(self) -> None:
        """Flush and stop recording; closing twice is harmless."""
        self.on = False
        self.flush()
        with self._writing:
            if self._file is not None:
                os.close(self._file)
                self._file = None

    def _keep_small(self) -> None:
        if len(self._pending) >= _BATCH:
            self.flush()

    def _write(self, data: bytes) -> None:
        # A forked child (a data loader worker, say) inherits the queue and must not write it again.
        if self._file is None or os.getpid() != self._pid:
            return
        try:
            while data:
                data = data[os.write(self._file, data) :]
        except OSError as error:
            # A full disk must not end a training that goes well otherwise.
            _log.warning("tracing stops: cannot write %s: %s", self._path, error)
            os.close(self._file)
            self._file = None
            self.on = False


def open_trace(path: str | os.PathLike[str], *, rank: int, world: int, run_id: str) -> FileTracer:
    """Open the trace file of one rank, making its folder; an existing file is continued.

    Args:
        path: The file, by convention ``runs/<id>/trace/rank-<rank>.jsonl``.
        rank: This process's rank.
        world: The number of ranks.
        run_id: The id of the run.

    Raises:
        TraceError: The file cannot be created or written.
    """
    epoch_ns, perf_ns = _clock_pair()
    header = {
        "sapwood_trace": FORMAT,
        "run": run_id,
        "rank": rank,
        "world": world,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "epoch_ns": epoch_ns,
        "perf_ns": perf_ns,
    }
    return FileTracer(Path(path), header)


def _open_for_append(path: Path) -> int:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        torn = path.exists() and path.stat().st_size > 0 and _last_byte(path) != b"\n"
        file = open_regular(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        if torn:  # an earlier process was killed while writing: our header gets a line of its own
            os.write(file, b"\n")
    except OSError as error:
        raise TraceError(
            f"cannot write the trace file {path}: {error.strerror}; "
            "choose a folder this user can write to, or turn tracing off"
        ) from error
    return file


def _last_byte(path: Path) -> bytes:
    with os.fdopen(open_regular(path), "rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1)


def _clock_pair() -> tuple[int, int]:
    """Both clocks at the same moment: the tightest of a few readings, as we may be interrupted."""
    best: tuple[int, int, int] | None = None
    for _ in range(5):
        before = perf_counter_ns()
        epoch = time_ns()
        width = perf_counter_ns() - before
        if best is None or width < best[0]:
            best = (width, epoch, before + width // 2)
    assert best is not None
    return best[1], best[2]


def _record_line(record: _Pending) -> bytes:
    name, lane, time, end, value, args = record
    fields: dict[str, object] = {"n": name, "l": lane, "t": time}
    if end is not None:
        fields["d"] = end - time
    if value is not None:
        fields["v"] = value
    if args:
        fields["a"] = args
    return _line(fields)


def _line(fields: dict[str, object]) -> bytes:
    return _encode(fields).encode() + b"\n"


def _plain(value: object) -> object:
    """What json cannot write: numbers of other libraries as numbers, the rest as text."""
    item = getattr(value, "item", None)
    return item() if callable(item) else str(value)


# One encoder for all lines: json.dumps would build a new one for each.
_encode = json.JSONEncoder(separators=(",", ":"), default=_plain).encode
