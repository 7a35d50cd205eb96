"""Reading tensors whatever form they are in, all of them or some of their bytes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from sapwood.buffers.fresh import fresh_memory
from sapwood.errors import Damaged
from sapwood.repository.catalog import Catalog, Place
from sapwood.repository.cold.form import CHUNK, ColdTable, decode_chunk, head_bytes
from sapwood.storage import Keeper, Wanted

__all__ = ["ColdReader"]

_LONGEST = 64
"""Bases behind each other; cooling stops long before, so this is a circle in a damaged catalog."""


class ColdReader:
    """Reads from a keeper what a catalog tells of. Owns neither."""

    def __init__(self, catalog: Catalog, keeper: Keeper) -> None:
        """Nothing is read yet."""
        self._catalog, self._keeper = catalog, keeper

    def read(self, place: Place, start: int, out: memoryview) -> None:
        """Fill ``out`` from a blob, as it was saved.

        Raises:
            Gone: it, or what it differs from, was removed.
            NotFound: it was moved meanwhile.
            Damaged: its bytes are not what was written.
        """
        self._read(place, self.bases([place]), start, out)

    def whole(self, place: Place) -> memoryview:
        """All of a blob, in memory of its own."""
        memory = fresh_memory(place.nbytes).data.cast("B")
        self.read(place, 0, memory)
        return memory

    def bases(self, places: Iterable[Place]) -> dict[int, Place]:
        """Where all is that these blobs differ from."""
        found: dict[int, Place] = {}
        wanted = {place.base for place in places if place.base is not None}
        for _ in range(_LONGEST):
            if not wanted:
                return found
            more = self._catalog.places(wanted, cold=True)
            found |= more
            wanted = {p.base for p in more.values() if p.base is not None} - found.keys()
        raise Damaged("a tensor differs from one that differs from it: the catalog is damaged")

    def _read(self, place: Place, bases: Mapping[int, Place], start: int, out: memoryview) -> None:
        if place.base is None:
            self._keeper.read([Wanted(place.pack, place.start + start, out)])
            return
        if not len(out):
            return
        table = self._table(place)
        first, last = start // CHUNK, (start + len(out) - 1) // CHUNK
        frames = self._frames(place, table, first, last)
        for number in range(first, last + 1):
            begin, nbytes = table.chunk(number)
            base = memoryview(bytearray(nbytes))
            self._read(bases[place.base], bases, begin, base)
            low, high = max(start, begin), min(start + len(out), begin + nbytes)
            frame = frames[table.starts[number] - table.starts[first] :][
                : table.starts[number + 1] - table.starts[number]
            ]
            if high - low == nbytes:
                decode_chunk(table, number, frame, base, out[low - start : high - start])
                continue
            chunk = memoryview(bytearray(nbytes))
            decode_chunk(table, number, frame, base, chunk)
            out[low - start : high - start] = chunk[low - begin : high - begin]

    def _table(self, place: Place) -> ColdTable:
        size = head_bytes(place.nbytes)
        if size > place.packed:
            raise Damaged(f"a tensor of {place.nbytes} bytes in cold form is truncated")
        head = memoryview(bytearray(size))
        self._keeper.read([Wanted(place.pack, place.start, head)])
        return ColdTable.decode(head, place.nbytes, place.packed)

    def _frames(self, place: Place, table: ColdTable, first: int, last: int) -> memoryview:
        begin, end = table.starts[first], table.starts[last + 1]
        memory = memoryview(bytearray(end - begin))
        self._keeper.read([Wanted(place.pack, place.start + begin, memory)])
        return memory
