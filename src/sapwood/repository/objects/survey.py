"""What is in a place, and which of it a version needs: what gc goes by."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from sapwood.errors import NotFound
from sapwood.repository.objects.blobs import Spot, decode_moved
from sapwood.repository.objects.head import BlobRow, Head
from sapwood.repository.objects.journal import Journal, side_by_side
from sapwood.repository.objects.layout import LARGEST, MOVED
from sapwood.repository.objects.view import View
from sapwood.repository.packs import FOLDER
from sapwood.storage import Entry, Keeper

__all__ = ["Survey", "Surveyor"]

_HOPS = 100
"""A pack may be moved several times; a table that leads to itself is no place."""


@dataclass(kw_only=True)
class Survey:
    """One look at all of it."""

    packs: Mapping[str, Entry]
    """Those that there were before the logs were read: what is newer is not here."""
    moved: Mapping[str, Mapping[bytes, Spot]]
    ever: set[str]
    """Packs that a version was ever saved with, or that gc has moved something to."""
    spots: dict[bytes, Spot] = field(default_factory=dict)
    """The one place of each run of bytes that stays, of those it lies at."""
    sizes: dict[bytes, int] = field(default_factory=dict)
    through: dict[str, set[bytes]] = field(default_factory=lambda: defaultdict(set))
    """For each pack, what a reader of some version looks for in it."""
    live: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    """Bytes of each pack that stay there."""

    def add(self, row: BlobRow) -> None:
        """A version needs it."""
        spot = (row.pack, row.start)
        for _ in range(_HOPS):
            self.through[spot[0]].add(row.digest)
            after = self.moved.get(spot[0], {}).get(row.digest)
            there = spot[0] in self.packs
            # A table that leads to what is not there is wrong as long as its own pack is.
            if after is None or (there and after[0] not in self.packs):
                break
            spot = after
        known = self.spots.get(row.digest)
        # The oldest stays, of those that are there: all gc runs choose the same.
        if known is None or (spot[0] not in self.packs, spot) < (known[0] not in self.packs, known):
            self.spots[row.digest] = spot
        self.sizes[row.digest] = row.nbytes

    def count(self) -> None:
        """Once all versions were added."""
        for digest, (pack, _) in self.spots.items():
            self.live[pack] += self.sizes[digest]


class Surveyor:
    """Looks several times, and reads each head once."""

    def __init__(self, keeper: Keeper, journal: Journal, view: View) -> None:
        """It owns nothing."""
        self._keeper, self._journal, self._view = keeper, journal, view
        self._rows: dict[int, Sequence[BlobRow]] = {}

    def look(self) -> Survey:
        """In this order: what is put while it looks is either not listed, or seen to be needed.

        Raises:
            Damaged: a log or a head is damaged, so that it is not known what is needed.
        """
        packs = {entry.key: entry for entry in self._keeper.list(FOLDER)}
        moved = dict(side_by_side(self._table, [e.key for e in self._keeper.list(MOVED)]))
        moved.pop("", None)
        self._journal.sync_all()
        ever = {saved.pack for saved in self._view.saved.values() if saved.pack is not None}
        ever |= {pack for spots in moved.values() for pack, _ in spots.values()}
        found = Survey(packs=packs, moved=moved, ever=ever)
        live = self._view.live()
        side_by_side(self._load, [id for id in live if id not in self._rows])
        for id in live:
            for row in self._rows.get(id, ()):
                found.add(row)
        found.count()
        return found

    def _table(self, key: str) -> tuple[str, dict[bytes, Spot]]:
        try:
            return decode_moved(self._keeper.get(key, limit=LARGEST), key)
        except NotFound:  # another gc has found that nobody needs it
            return "", {}

    def _load(self, id: int) -> None:
        saved = self._view.saved[id]
        try:
            content = self._keeper.get(saved.head, limit=LARGEST)
        except NotFound:
            self._journal.sync(saved.name)
            if self._view.is_live(id):
                raise
            return
        head = Head.decode(content, saved.head)
        # Rows that no tensor refers to are not there: ``write`` makes none.
        self._rows[id] = head.rows
