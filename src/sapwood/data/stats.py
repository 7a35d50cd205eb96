"""What reading cost, in numbers."""

from __future__ import annotations

import math
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from time import perf_counter_ns

from sapwood.trace import OFF, Tracer

__all__ = ["ReadStats", "Recorder"]


@dataclass(kw_only=True)
class ReadStats:
    """Sums since the reader was made, of this rank."""

    batches: int = 0
    samples: int = 0
    bytes_useful: int = 0
    """Bytes of records that were asked for."""
    bytes_read: int = 0
    """Bytes that were asked of the file; gathering from memory asks for what it touches."""
    requests: int = 0
    sizes: dict[int, int] = field(default_factory=dict)
    """How many requests were of up to so many bytes; sizes are powers of two."""
    read_seconds: float = 0.0
    """Spent in reading, by all threads together."""
    wait_seconds: float = 0.0
    """Spent by the training in waiting for a batch that was not read yet."""
    gather_seconds: float = 0.0
    """Spent by the training in copying records together."""
    stagger_seconds: float = 0.0
    """Spent in waiting for one's turn to read."""
    skew_seconds: float = 0.0
    """From having a batch until the last rank of the host had it, with ``share``; the last few
    batches of a pass are not in it. ``skew_of`` tells it of any ranks, from their traces."""
    missed_pages: int = 0
    """Pages that were needed and had not been read ahead."""
    redundant_pages: int = 0
    """Pages that were read ahead and not needed."""
    switches_waiting: int = 0
    """Times the process gave up the processor to wait."""
    switches_forced: int = 0
    """Times the processor was taken from the process."""

    @property
    def useful(self) -> float:
        """The part of the bytes read that somebody had asked for; above 1 when they were reused."""
        return self.bytes_useful / self.bytes_read if self.bytes_read else 0.0


_READING = (
    "bytes_read",
    "requests",
    "read_seconds",
    "stagger_seconds",
    "missed_pages",
    "redundant_pages",
)


class Recorder:
    """Counts for one reader; only the thread that reads batches calls it."""

    def __init__(self, trace: Tracer = OFF) -> None:
        """Begin at zero."""
        self.stats = ReadStats()
        self.trace = trace
        self._switches = _switches()
        self._helpers: list[Recorder] = []
        self._asker = self
        self._half = 0, 0.0

    def helper(self) -> Recorder:
        """For a thread that reads on behalf of this one: what it reads is counted here, too."""
        made = Recorder(self.trace)
        made._asker = self
        self._helpers.append(made)
        return made

    def halfway(self) -> None:
        """Note the middle of an epoch, before which memory had to be made and the first to come."""
        self._half = self._paced()

    def pace(self) -> float:
        """Bytes read in one second of waiting for them, since the middle of the last epoch."""
        nbytes, seconds = self._asker._paced()
        before, waited = self._asker._half
        return (nbytes - before) / (seconds - waited) if seconds > waited else math.inf

    def _paced(self) -> tuple[int, float]:
        nbytes = self.stats.bytes_read + sum(one.stats.bytes_read for one in self._helpers)
        return nbytes, self.stats.wait_seconds

    def request(self, nbytes: int, start_ns: int = 0, end_ns: int = 0, count: int = 1) -> None:
        """Note one read, or ``count`` of them, of so many bytes together."""
        stats = self.stats
        stats.requests += count
        stats.bytes_read += nbytes
        stats.read_seconds += (end_ns - start_ns) / 1e9
        size = 1 << max(-(-nbytes // count) - 1, 0).bit_length()
        stats.sizes[size] = stats.sizes.get(size, 0) + count
        if self.trace.on and end_ns:
            self.trace.complete("read", start_ns, end_ns, "data", bytes=nbytes)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Note that the training waits for data meanwhile."""
        start = perf_counter_ns()
        try:
            yield
        finally:
            end = perf_counter_ns()
            self.stats.wait_seconds += (end - start) / 1e9
            if self.trace.on:
                self.trace.complete("wait for data", start, end, "main")

    def batch(self, samples: int, nbytes: int, gather_ns: int = 0) -> None:
        """Note a batch that was given out."""
        self.stats.batches += 1
        self.stats.samples += samples
        self.stats.bytes_useful += nbytes
        self.stats.gather_seconds += gather_ns / 1e9
        if self.trace.on:
            self.trace.counter("data bytes read", self.stats.bytes_read, "data")
            self.trace.counter("data bytes useful", self.stats.bytes_useful, "data")

    def given(self, start_ns: int, epoch: int, number: int) -> None:
        """Note how long the training had to wait for a batch, from asking for it."""
        if self.trace.on:
            self.trace.complete(
                "batch", start_ns, perf_counter_ns(), "data", epoch=epoch, batch=number
            )

    def snapshot(self) -> ReadStats:
        """The sums so far."""
        waiting, forced = _switches()
        found = replace(
            self.stats,
            sizes=dict(self.stats.sizes),
            switches_waiting=waiting - self._switches[0],
            switches_forced=forced - self._switches[1],
        )
        for helper in self._helpers:
            for name in _READING:
                setattr(found, name, getattr(found, name) + getattr(helper.stats, name))
            for size, count in dict(helper.stats.sizes).items():
                found.sizes[size] = found.sizes.get(size, 0) + count
        found.sizes = dict(sorted(found.sizes.items()))
        return found

    def summarise(self, file: str) -> None:
        """Write the sums to the trace; ``file`` is what was read."""
        if self.trace.on:
            self.trace.instant("data read", "data", file=file, **asdict(self.snapshot()))


def _switches() -> tuple[int, int]:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_nvcsw, usage.ru_nivcsw
