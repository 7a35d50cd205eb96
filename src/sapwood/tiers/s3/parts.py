"""How a file is put together from shards: which of its parts the server can copy by itself.

A part of a multipart upload has at least 5 MiB, except the last. A run of bytes that lies in one
shard and is as long as that is copied by the server. What is shorter (the header, small tensors,
slices between ranks that hold little) is gathered with its neighbours into parts that have to be
sent; a gathered part that is still too short takes the beginning of the long run behind it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from sapwood.errors import CheckpointError
from sapwood.state.catalog import FileLayout
from sapwood.state.shards import Shard

__all__ = ["GATHER", "HEADER", "MINIMUM", "Part", "Run", "plan_parts"]

MINIMUM = 5 * 2**20
"""S3's lower limit for all parts but the last."""
GATHER = 16 * 2**20
"""A gathered part is closed once it has this much."""
COPY = 256 * 2**20
"""The server is not asked to copy more at once, so that it answers in time."""
_MOST_PARTS = 9000  # S3 allows 10,000
HEADER = -1
"""In place of a rank: the bytes are the file's header."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Bytes that lie side by side in the file and in one shard."""

    rank: int
    at: int
    """Offset in the shard."""
    nbytes: int


@dataclass(frozen=True, slots=True)
class Part:
    """One part of a file: a single run that is copied, or several that are gathered."""

    runs: tuple[Run, ...]
    copied: bool

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return sum(run.nbytes for run in self.runs)


def plan_parts(layout: FileLayout, shards: Mapping[int, Shard]) -> list[Part]:
    """The parts of a file, in order.

    Raises:
        CheckpointError: the shards do not hold every byte of the file once.
    """
    runs = _runs(layout, shards)
    minimum = max(MINIMUM, -(-layout.size // _MOST_PARTS))
    parts: list[Part] = []
    waiting: list[Run] = []
    have = 0
    for run in runs:
        need = max(0, minimum - have) if waiting else 0
        if run.nbytes - need < minimum:
            waiting.append(run)
            have += run.nbytes
            if have >= max(GATHER, minimum):
                parts.append(Part(tuple(waiting), copied=False))
                waiting, have = [], 0
            continue
        if waiting:
            first = [replace(run, nbytes=need)] if need else []
            parts.append(Part((*waiting, *first), copied=False))
            waiting, have = [], 0
        parts += _copies(replace(run, at=run.at + need, nbytes=run.nbytes - need), minimum)
    if waiting:
        parts.append(Part(tuple(waiting), copied=False))
    return parts


def _copies(run: Run, minimum: int) -> Iterator[Part]:
    """Equal parts: none is too short, none too long."""
    count = -(-run.nbytes // max(COPY, 2 * minimum))
    step = -(-run.nbytes // count)
    for start in range(0, run.nbytes, step):
        nbytes = min(step, run.nbytes - start)
        yield Part((replace(run, at=run.at + start, nbytes=nbytes),), copied=True)


def _runs(layout: FileLayout, shards: Mapping[int, Shard]) -> list[Run]:
    """The runs of a file in its order, neighbours that are also neighbours in a shard as one."""
    found = [(0, Run(rank=HEADER, at=0, nbytes=len(layout.header)))]
    for rank, shard in shards.items():
        for piece in shard.pieces:
            if piece.file == layout.file and piece.nbytes:
                at = layout.start(piece.name) + piece.start
                found.append((at, Run(rank=rank, at=piece.at, nbytes=piece.nbytes)))
    found.sort(key=lambda row: row[0])
    runs: list[Run] = []
    end = 0
    for start, run in found:
        if start != end:
            raise _uneven(layout, start, end)
        end = start + run.nbytes
        last = runs[-1] if runs else None
        if last is not None and last.rank == run.rank and last.at + last.nbytes == run.at:
            runs[-1] = replace(last, nbytes=last.nbytes + run.nbytes)
        else:
            runs.append(run)
    if end != layout.size:
        raise _uneven(layout, layout.size, end)
    return runs


def _uneven(layout: FileLayout, start: int, end: int) -> CheckpointError:
    what = "are in no shard" if start > end else "are in two shards"
    low, high = sorted((start, end))
    return CheckpointError(f"bytes {low} to {high} of {layout.filename} {what}")
