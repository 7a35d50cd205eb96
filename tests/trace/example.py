"""A small, realistic trace made by hand: two ranks, three steps, four buckets."""

from __future__ import annotations

from pathlib import Path

from sapwood.trace import open_trace

MS = 1_000_000
BUCKETS = 4


def write_example(folder: Path, *, ranks: int = 2, steps: int = 3, run_id: str = "example") -> None:
    """Backward takes 5 ms; bucket b's gradient is ready 1.2 ms after that of bucket b - 1."""
    for rank in range(ranks):
        tracer = open_trace(folder / f"rank-{rank}.jsonl", rank=rank, world=ranks, run_id=run_id)
        for step in range(steps):
            _step(tracer, step, start=(10 * step) * MS + rank * MS // 10)
        tracer.counter("loss", 0.5)
        tracer.close()


def _step(tracer, step: int, start: int) -> None:
    backward = start + 3 * MS
    last_gradient = backward + 5 * MS
    tracer.complete("forward", start, backward, step=step)
    tracer.complete("backward", backward, last_gradient, step=step)
    free = 0
    for bucket in range(BUCKETS):
        ready = backward + (bucket + 1) * 12 * MS // 10
        begin = max(ready, free)
        free = begin + MS
        tracer.complete("reduce", begin, free, lane="comm", step=step, bucket=bucket, bytes=4096)
        tracer.complete(
            "update", free, free + MS // 5, lane="update", step=step, bucket=bucket, names=["w"]
        )
    _instant_at(tracer, "backward_last_gradient", last_gradient, step)
    tracer.complete("wait", last_gradient, free + MS // 5, step=step)
    _instant_at(tracer, "step_ended", free + MS // 5, step)


def _instant_at(tracer, name: str, time: int, step: int) -> None:
    # The public call reads the clock; an example needs a moment of its own choosing.
    tracer._pending.append((name, "main", time, None, None, {"step": step}))
