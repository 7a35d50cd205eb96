"""What every engine has to do, and what it is given."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from sapwood.data.engines.spare import Spare
from sapwood.data.index import Index
from sapwood.data.order.chunks import Chunks
from sapwood.data.source import ALIGN, Source
from sapwood.data.stats import Recorder
from sapwood.errors import ConfigError

__all__ = ["MIB", "Bytes", "Engine", "EngineSettings", "Ints", "Job"]

Ints = NDArray[np.int64]
Bytes = NDArray[np.uint8]
MIB = 2**20


@dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """How much memory and how many threads reading may take."""

    memory: int = 128 * MIB
    """Bytes of the ring that chunks are read into; with the batches given out that is all."""
    threads: int = 4
    """How many reads are in flight at the same time."""
    ahead: int = 32
    """How many batches are planned ahead, at most; the ring may end it before."""
    timeout: float = 120.0
    """Seconds a read may take before that is an error."""

    def __post_init__(self) -> None:
        """Refuse what cannot work.

        Raises:
            ConfigError: a number is too small.
        """
        for name, least in (("memory", ALIGN), ("threads", 1), ("ahead", 1)):
            if getattr(self, name) < least:
                raise ConfigError(f"{name}={getattr(self, name)}: expected {least} or more")
        if self.timeout <= 0:
            raise ConfigError(f"timeout={self.timeout:g}: expected more than 0 seconds")


@dataclass(frozen=True, kw_only=True)
class Job:
    """What an engine reads from, and how."""

    source: Source
    index: Index
    chunks: Chunks
    settings: EngineSettings
    recorder: Recorder
    uses: int = 1
    """How often each record is used in an epoch."""
    spare: Spare = field(default_factory=Spare)

    def places(self, records: Ints) -> tuple[Ints, Ints]:
        """Offsets and lengths of records."""
        return self.index.offsets[records], self.index.lengths_of(records)


class Engine(Protocol):
    """One way to read.

    ``wanted`` gives the numbers of the records of each batch; an engine may look ahead in it as far
    as it likes, on the thread that asks for batches. For each it gives the bytes of those records,
    in that order and without gaps, in memory it does not use again. Closing the generator ends
    whatever it started. The caller checks that the database was not changed meanwhile.
    """

    name: str

    def read(self, wanted: Iterator[Ints]) -> Generator[Bytes, None, None]:
        """Read batch after batch.

        Raises:
            DataError: the database cannot be read.
            DeadlineError: the disk did not answer in time.
        """
        ...
