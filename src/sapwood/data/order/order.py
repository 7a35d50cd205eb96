"""The order of batches: which records each batch has, and which of them are a rank's.

shuffle  streams  a batch takes
none     1        the next records in the order of keys
global   1        records from anywhere
window   several  an equal share from each stream. Chunks of the file are permuted and laid end
                  to end; each stream has an equal part of that line and goes along it window
                  by window, in another order inside of each
reuse    several  the same, but each window is gone through several times before the next one,
                  and records may be exchanged between the windows of some or all streams
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import accumulate
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sapwood.data.order.chunks import Chunks
from sapwood.data.order.kept import Kept
from sapwood.data.order.permute import Permutation, key_of, mix
from sapwood.data.order.spec import OrderSpec
from sapwood.errors import ConfigError, DataError

__all__ = ["Order"]

Ints = NDArray[np.int64]
Table = NDArray[np.int32] | NDArray[np.int64]

_CHUNKS, _WINDOW, _GLOBAL, _REUSE = range(1, 5)
"""Keep the keys of different permutations apart."""
_DRAWN = 2 * 2**20
"""Bytes of each kind of drawn orders that are kept, unless a few of them take more already."""


class _Line(NamedTuple):
    """The chunks of an epoch, in their order, and where each begins."""

    chunks: Ints
    starts: Ints

    @property
    def nbytes(self) -> int:
        return self.chunks.nbytes + self.starts.nbytes


class Order:
    """The batches of every epoch; batches of an epoch are numbered from 0."""

    def __init__(self, spec: OrderSpec, chunks: Chunks) -> None:
        """Nothing is drawn yet.

        Raises:
            DataError: there are no records.
        """
        self.spec = spec
        self._chunks = chunks
        self._count = chunks.count
        if not self._count:
            raise DataError("the database has no records; expected one at least")
        self._streams = spec.streams if spec.shuffle in ("window", "reuse") else 1
        self.samples = self._count * spec.factor
        """Records of an epoch; with ``reuse`` each counts as often as it is used."""
        whole = self.samples // spec.batch
        self.batches = whole if spec.tail == "drop" else -(-self.samples // spec.batch)
        """Batches of an epoch."""
        if not self.batches:
            raise ConfigError(
                f"batch_size={spec.batch} with tail='drop': an epoch has only {self.samples} "
                "records and so no batch; choose a smaller batch, or tail='pad'"
            )
        most = 4 * self._streams + 16
        # Each stream needs its window again and again. Of the orders of reused records only the
        # present one is needed, and the next: each is as long as all windows together.
        self._windows: Kept[Permutation] = Kept(least=self._streams + 4, most=most, nbytes=_DRAWN)
        self._turns: Kept[Table] = Kept(least=2, most=most, nbytes=_DRAWN)
        self._lines: Kept[_Line] = Kept(least=2, most=2, nbytes=_DRAWN)
        self._rows: Kept[Ints] = Kept(least=self._streams + 1, most=most, nbytes=_DRAWN)

    def rows(self, number: int) -> int:
        """How many records a batch has, over all ranks."""
        if self.spec.tail != "keep":
            return self.spec.batch
        return min(self.spec.batch, self.samples - number * self.spec.batch)

    def batch(self, epoch: int, number: int) -> Ints:
        """The records of a whole batch."""
        return self.parts(epoch, [number])[0]

    def parts(
        self, epoch: int, numbers: Sequence[int], *, rank: int = 0, world: int = 1
    ) -> list[Ints]:
        """A rank's records of several batches: put together, ranks give the whole batches."""
        slots = [number * self.spec.batch + self._inside(number, rank, world) for number in numbers]
        if not slots:
            return []
        found = self._records(epoch, np.concatenate(slots) % self.samples)
        ends = list(accumulate(len(one) for one in slots))
        return [found[low:high] for low, high in zip([0, *ends], ends, strict=False)]

    def _inside(self, number: int, rank: int, world: int) -> Ints:
        """A rank's positions in a batch, by stream, so that it needs few streams."""
        rows, phase = self.rows(number), number * self.spec.batch % self._streams

        def by_stream() -> Ints:
            return np.argsort((phase + np.arange(rows)) % self._streams, kind="stable")

        slots = self._rows.get((phase, rows), by_stream)
        return slots[rank * rows // world : (rank + 1) * rows // world]

    def _records(self, epoch: int, slots: Ints) -> Ints:
        if self.spec.shuffle == "none":
            return slots
        if self.spec.shuffle == "global":
            return self._permutation(self._count, _GLOBAL, epoch)(slots)
        if self.spec.shuffle == "reuse":
            places = self._recombined(epoch, slots)
            stream, item = places % self._streams, places // self._streams
        else:
            stream, item = slots % self._streams, slots // self._streams
            item = self._windowed(epoch, stream, item)
        share, rest = divmod(self._count, self._streams)
        return self._laid_out(epoch, stream * share + np.minimum(stream, rest) + item)

    def _laid_out(self, epoch: int, places: Ints) -> Ints:
        """The records at these places of the permuted chunks, laid end to end."""
        chunks = self._chunks

        def line() -> _Line:
            order = Permutation(len(chunks), self._key(_CHUNKS, epoch))(np.arange(len(chunks)))
            return _Line(order, np.concatenate([[0], np.cumsum(chunks.counts[order])]))

        order, starts = self._lines.get(epoch, line)
        slot = np.searchsorted(starts, places, side="right") - 1
        return chunks.at(chunks.starts[order[slot]] + places - starts[slot])

    def _windowed(self, epoch: int, stream: Ints, item: Ints) -> Ints:
        """Permute inside of windows; those of different streams end at different times."""
        width = self.spec.window
        shift = stream * width // self._streams
        window = (item + shift) // width
        mark = window * self._streams + stream
        found = np.empty_like(item)
        for one, chosen in _groups(mark):
            low, high = self._bounds(one)
            place = self._permutation(high - low, _WINDOW, epoch, one)
            found[chosen] = low + place(item[chosen] - low)
        return found

    def _bounds(self, mark: int) -> tuple[int, int]:
        """The items of a stream between which one of its windows lies."""
        window, stream = divmod(mark, self._streams)
        width = self.spec.window
        low = window * width - stream * width // self._streams
        share, rest = divmod(self._count, self._streams)
        return max(low, 0), min(low + width, share + (stream < rest))

    def _recombined(self, epoch: int, slots: Ints) -> Ints:
        """Where the records used now were in the order of reading."""
        held = self.spec.window * self._streams
        load = np.minimum(slots // (held * self.spec.factor), (self._count - 1) // held)
        left = slots - load * held * self.spec.factor
        size = np.minimum(held, self._count - load * held)
        turn = load * self.spec.factor + left // size
        found = np.empty_like(slots)
        for one, chosen in _groups(turn):
            base, count = int(load[chosen[0]]) * held, int(size[chosen[0]])
            table = self._turns.get((epoch, one), partial(self._turn, epoch, one, count))
            found[chosen] = table[left[chosen] % count]
            found[chosen] += base
        return found

    def _turn(self, epoch: int, turn: int, count: int) -> Table:
        """One more order of the records in memory, each inside of its cell of streams."""
        key = np.uint64(self._key(_REUSE, epoch, turn))
        table: Table = np.empty(count, np.int64)
        if count < 2**31:
            table = np.empty(count, np.int32)
        mixed, rounds = self.spec.mixed, np.arange(-(-count // self._streams)) * self._streams
        for first in range(0, self._streams, mixed):  # cell by cell: less memory for the sorting
            streams = np.arange(first, min(first + mixed, self._streams))
            places = (rounds[:, None] + streams).reshape(-1)
            places = places[: np.searchsorted(places, count)]
            words = places.astype(np.uint64)
            words *= np.uint64(2**33 + 1)
            words += key
            table[places] = places[np.argsort(mix(words))]
        return table

    def _key(self, *what: int) -> int:
        return key_of(self.spec.seed, *what)

    def _permutation(self, count: int, *what: int) -> Permutation:
        return self._windows.get((count, *what), lambda: Permutation(count, self._key(*what)))


def _groups(marks: Ints) -> Iterator[tuple[int, Ints]]:
    """Each mark, and where it stands."""
    if not len(marks):
        return
    order = np.argsort(marks, kind="stable")
    sorted_marks = marks[order]
    starts = np.flatnonzero(np.diff(sorted_marks, prepend=sorted_marks[0] - 1))
    yield from zip(sorted_marks[starts].tolist(), np.split(order, starts[1:]), strict=True)
