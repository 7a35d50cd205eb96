"""Measuring in turns, so that what disturbs the machine disturbs all alike."""

from __future__ import annotations

import os
import random
import statistics
import tempfile
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

from sapwood.data import memory
from sapwood.data.bench.ways import Disk, Reader, Way, peer
from sapwood.data.check import require_number
from sapwood.data.engines import Policy
from sapwood.data.index import Index
from sapwood.data.order.spec import Shuffle
from sapwood.data.reader import LmdbReader
from sapwood.data.sidecar import open_index
from sapwood.data.source import Source
from sapwood.data.write.base import Phase, load_lmdb, silent
from sapwood.errors import ConfigError

__all__ = ["POLICIES", "Report", "Row", "bench"]

POLICIES: tuple[Policy, ...] = ("auto", "lmdb", "lmm", "lmm-dm", "dio", "coal")
"""Those that need nothing but the database."""
_ROUNDS = 3
_DROPPED = 0.05
_READ = 4 * 2**20


@dataclass(frozen=True, kw_only=True)
class Row:
    """What one way to read has reached."""

    name: str
    cold: bool
    """The file was not in the page cache when an epoch began."""
    samples: float | None
    """A second; the disk has none."""
    nbytes: float
    """Bytes of values a second, or of the file for the disk."""
    of_disk: float
    """Bytes, as a part of what the disk gave in the same rounds."""


@dataclass(frozen=True, kw_only=True)
class Report:
    """All rows, and what could not be measured, with the reason."""

    records: int
    value_bytes: int
    file_bytes: int
    rows: tuple[Row, ...]
    notes: tuple[str, ...]


def bench(
    path: str | os.PathLike[str],
    *,
    database: str | None = None,
    batch_size: int = 256,
    shuffle: Shuffle = "window",
    policies: Sequence[Policy] = ("auto",),
    seconds: float = 3.0,
    seed: int = 0,
    phase: Phase = silent,
) -> Report:
    """Read a database for some seconds in each way, cold and warm, one process with one rank.

    Nothing is written beside it.

    Args:
        path: An LMDB file, or a folder with data.mdb in it.
        database: A named database; the main one if none is given.
        batch_size: Records of a batch.
        shuffle: The order of the reader; py-lmdb gets keys in any order unless it is ``none``.
        policies: How our reader reads; each is one row.
        seconds: How long each way reads, cold and warm, in rounds that take turns.
        seed: Of the order.
        phase: Told how far it is, in milliseconds.

    Raises:
        ConfigError: options make no sense, or py-lmdb is missing.
        DataError: the database is damaged or has no records.
    """
    lmdb = load_lmdb("bench")
    _check(policies, seconds)
    with tempfile.TemporaryDirectory(prefix="sapwood-bench-") as folder:
        kept = Path(folder) / "index"
        index = open_index(path, database, file=kept)
        readers = [
            LmdbReader(
                path,
                batch_size,
                database=database,
                shuffle=shuffle,
                seed=seed,
                policy=policy,
                rank=0,
                world=1,
                index=kept,
            )
            for policy in policies
        ]
        ways: list[Way] = [Reader(p, r) for p, r in zip(policies, readers, strict=True)]
        ways += [peer(lmdb, index, batch_size, shuffle, seed), Disk(index)]
        rows, notes = _all(index, ways, seconds, phase)
        return Report(
            records=len(index),
            value_bytes=int(index.lengths.sum()),
            file_bytes=index.fingerprint.size,
            rows=tuple(rows),
            notes=tuple(notes),
        )


def _check(policies: Sequence[Policy], seconds: float) -> None:
    if require_number("seconds", seconds) <= 0:
        raise ConfigError(f"seconds={seconds:g}: expected more than 0")
    for policy in policies:
        if policy not in POLICIES:
            raise ConfigError(f"policy={policy!r}: expected one of {', '.join(POLICIES)}")
    if not policies or len(set(policies)) != len(policies):
        raise ConfigError(f"policies={list(policies)}: expected one or more, each once")


def _all(
    index: Index, ways: Sequence[Way], seconds: float, phase: Phase
) -> tuple[list[Row], list[str]]:
    rows: list[Row] = []
    notes: list[str] = []
    total = int(seconds * len(ways) * 1000)
    if _drop(index):
        with phase("reading cold", total) as advance:
            rows += _rounds(ways, seconds, lambda: _drop(index), advance, cold=True)
    else:
        notes.append("cold: left out, as the page cache keeps the file whatever it is told")
    if index.fingerprint.size <= memory.available() // 2:
        _load(index)
        with phase("reading warm", total) as advance:
            rows += _rounds(ways, seconds, lambda: None, advance, cold=False)
    else:
        notes.append("warm: left out, as the file is larger than half of the memory that is free")
    return rows, notes


def _rounds(
    ways: Sequence[Way],
    seconds: float,
    before: Callable[[], object],
    advance: Callable[[int], None],
    *,
    cold: bool,
) -> list[Row]:
    found: dict[str, list[tuple[float, float]]] = {way.name: [] for way in ways}
    for turn in range(_ROUNDS):
        # Nobody may always come first, or always after the same: who reads leaves traces in memory.
        for way in random.Random(turn).sample(ways, len(ways)):
            found[way.name].append(_round(way, seconds / _ROUNDS, before))
            advance(int(seconds / _ROUNDS * 1000))
    rates = {
        name: tuple(statistics.median(column) for column in zip(*rounds, strict=True))
        for name, rounds in found.items()
    }
    disk = rates[Disk.name][1]
    return [
        Row(name=name, cold=cold, samples=samples or None, nbytes=nbytes, of_disk=nbytes / disk)
        for name, (samples, nbytes) in rates.items()
    ]


def _round(way: Way, seconds: float, before: Callable[[], object]) -> tuple[float, float]:
    """Samples and bytes a second; a cold epoch is never read twice without dropping it."""
    spent, samples, nbytes = 0.0, 0, 0
    while spent < seconds:
        before()
        start = now = perf_counter()
        with closing(way.epoch()) as epoch:
            for count, size in epoch:
                samples, nbytes = samples + count, nbytes + size
                now = perf_counter()
                if spent + now - start >= seconds:
                    break
        spent += max(now - start, 1e-9)
    return samples / spent, nbytes / spent


def _drop(index: Index) -> bool:
    """Have the page cache forget the file; says whether it did."""
    with closing(Source(index)) as source, suppress(OSError):
        os.fsync(source.fd)  # pages that are not on the disk yet cannot be dropped
        os.posix_fadvise(source.fd, 0, 0, os.POSIX_FADV_DONTNEED)
        return source.resident() <= _DROPPED
    return False


def _load(index: Index) -> None:
    with closing(Source(index)) as source:
        for offset in range(0, source.size, _READ):
            os.pread(source.fd, _READ, offset)
