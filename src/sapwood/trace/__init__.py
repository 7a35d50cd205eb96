"""What happened when: spans, instants and counters of every rank, in one JSONL file per rank.

Writing (`open_trace`, `OFF`) is cheap enough to stay in a training loop. Reading
(`sapwood.trace.read`) and drawing (`timeline`, `svg`, `perfetto`, `summary`) are pure functions
over the records, and never run inside a training. Nothing here imports torch.
"""

from __future__ import annotations

from sapwood.trace.tracer import OFF, FileTracer, Tracer, open_trace

__all__ = ["OFF", "FileTracer", "Tracer", "open_trace"]
