"""Giving back the room of what no version needs, beside readers and writers of any machine.

Which packs go is decided in four steps, so that no save can come to share what is removed:

1. look which packs nobody needs, and write anew what little is needed of others;
2. condemn them: from now on no save begins to share them;
3. leave those on which a save has put a lease before that;
4. look again, and leave those that a save has come to need meanwhile.

What a save that is under way has written is not needed by any version yet: it is left for ``quiet``
seconds. Whoever is on the way to a pack that goes looks again, and finds what was moved.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress

from sapwood.errors import NotFound, StorageError, StoreError
from sapwood.repository.objects.blobs import Spot, encode_moved
from sapwood.repository.objects.journal import Journal, side_by_side
from sapwood.repository.objects.layout import (
    CONDEMNED,
    GC,
    HEADS,
    LAYERS,
    LEASES,
    condemned_key,
    framed_json,
    moved_key,
    new_token,
    parse_json,
)
from sapwood.repository.objects.saving import LEASE_KIND, leased
from sapwood.repository.objects.survey import Survey, Surveyor
from sapwood.repository.objects.view import View
from sapwood.repository.packs import lay_out, new_key, pieces
from sapwood.repository.sweeping import Swept
from sapwood.storage import Entry, Keeper, Wanted
from sapwood.storage.base import QUIET_SECONDS

__all__ = ["Sweep"]

log = logging.getLogger(__name__)
_KIND = b"GC"
_WORTH = 0.5
"""A pack of which less than this share is needed is written anew."""
_SOON = QUIET_SECONDS / 2
"""Signs of others are taken for those of the dead after ``QUIET_SECONDS``; so long they may act."""


class Sweep:
    """One gc run."""

    def __init__(
        self,
        keeper: Keeper,
        journal: Journal,
        view: View,
        *,
        quiet: float,
        said: Callable[[str], None],
    ) -> None:
        """It owns nothing; ``quiet`` as in ``Keeper.sweep``."""
        self._keeper, self._view = keeper, view
        self._surveyor = Surveyor(keeper, journal, view)
        self._quiet, self._said = quiet, said
        self._token = new_token()
        self._began = time.clock_gettime(time.CLOCK_BOOTTIME)
        self._written = 0

    def run(self) -> Swept:
        """Do it.

        Raises:
            Damaged: it cannot be told what is needed; nothing was removed.
        """
        sign = f"{GC}/{self._token}"
        self._keeper.put(sign, [framed_json(_KIND, {"quiet": self._quiet})])
        try:
            return self._run(self._now(sign))
        finally:
            with suppress(StorageError):
                self._keeper.remove([sign])

    def _run(self, now: float) -> Swept:
        self._said("looking for saves that never ended")
        drafts = self._keeper.sweep(self._quiet)
        heads = [*self._keeper.list(HEADS), *self._keeper.list(LAYERS)]
        self._said("looking at what versions need")
        first = self._surveyor.look()
        rewritten = self._thin(first)
        # What is written anew is needed by nobody before ``moved`` says so.
        target = [new_key() for _ in rewritten]
        with leased(self._keeper, target):
            spots = dict(first.spots)
            for pack, key in zip(rewritten, target, strict=True):
                self._said(f"writing {pack} anew: {first.live[pack]} bytes of it are needed")
                # Another gc may have removed it: then it has written anew what was needed, too.
                with suppress(NotFound):
                    spots |= self._write_anew(first, pack, key)
            gone = self._superseded(first, spots)
            for pack in gone:
                table = {digest: spots[digest] for digest in first.through[pack]}
                self._keeper.put(moved_key(pack), [encode_moved(pack, table)], replace=True)
            dead = [pack for pack in first.packs if self._is_dead(first, pack, now)]
            removed, last = self._remove([*gone, *dead], first, now)
        self._clear(heads, last, removed, now)
        return Swept(
            packs=len(removed),
            freed=sum(first.packs[pack].nbytes for pack in removed) - self._written,
            drafts=drafts,
            live=sum(last.sizes.values()),
        )

    def _now(self, sign: str) -> float:
        """The time by the clock of the place, by which it says how old objects are."""
        for entry in self._keeper.list(GC):
            if entry.key == sign:
                return entry.changed
        raise StoreError(f"{sign} was put and is not listed; lists of this place come too late")

    # -- what goes ---------------------------------------------------------------------------

    def _thin(self, found: Survey) -> list[str]:
        """Packs of which little is needed."""
        packs = []
        for pack, entry in found.packs.items():
            if not 0 < found.live.get(pack, 0) < _WORTH * entry.nbytes:
                continue
            sizes = [found.sizes[d] for d, spot in found.spots.items() if spot[0] == pack]
            if lay_out(sizes)[1] < entry.nbytes:
                packs.append(pack)
        return packs

    def _superseded(self, found: Survey, spots: Mapping[bytes, Spot]) -> list[str]:
        """Packs that readers look into, but nothing of which stays there."""
        stays = {spot[0] for spot in spots.values()}
        return [pack for pack in found.packs if found.through.get(pack) and pack not in stays]

    def _is_dead(self, found: Survey, pack: str, now: float) -> bool:
        """Nobody looks into it, and no save under way will."""
        if found.through.get(pack) or found.live.get(pack):
            return False
        return pack in found.ever or now - found.packs[pack].changed >= self._quiet

    def _write_anew(self, found: Survey, old: str, key: str) -> dict[bytes, Spot]:
        """Copy what is needed of a pack to another one; where it is then."""
        order = sorted((s[1], d) for d, s in found.spots.items() if s[0] == old)
        starts, nbytes = lay_out([found.sizes[digest] for _, digest in order])
        with self._keeper.begin(key, nbytes) as draft:
            at = 0
            for (start, digest), new in zip(order, starts, strict=True):
                blob = memoryview(bytearray(found.sizes[digest]))
                self._keeper.read([Wanted(old, start, blob)])
                draft.write_parts(pieces([new - at], [blob]))
                at = new + len(blob)
            draft.publish()
        self._written += nbytes
        return {digest: (key, new) for (_, digest), new in zip(order, starts, strict=True)}

    def _remove(self, packs: list[str], first: Survey, now: float) -> tuple[list[str], Survey]:
        """Steps 2 to 4; what was removed, and the last look."""
        signs = [condemned_key(pack, self._token) for pack in packs]
        try:
            side_by_side(lambda key: self._keeper.put(key, [b""]), signs)
            kept = self._leased(now)
            last = self._surveyor.look()
            going = [pack for pack in packs if pack not in kept and self._may_go(pack, first, last)]
            if time.clock_gettime(time.CLOCK_BOOTTIME) - self._began > _SOON:
                log.warning("gc took more than %g s and removes nothing; begin again", _SOON)
                going = []
            self._said(f"removing {len(going)} packs")
            self._keeper.remove(going)
        finally:
            with suppress(StorageError):
                self._keeper.remove(signs)
        return going, last

    @staticmethod
    def _may_go(pack: str, first: Survey, last: Survey) -> bool:
        needed = last.through.get(pack, set())
        if needed - first.through.get(pack, set()):
            return False  # a save has come to share it
        places = {last.spots[digest][0] for digest in needed}
        return pack not in places and places <= last.packs.keys()

    def _leased(self, now: float) -> set[str]:
        """Packs that saves under way may come to share."""
        entries = [e for e in self._keeper.list(LEASES) if now - e.changed < self._old]
        return {pack for packs in side_by_side(self._lease, entries) for pack in packs}

    def _lease(self, entry: Entry) -> list[str]:
        try:
            content = self._keeper.get(entry.key)
        except NotFound:
            return []
        return [str(pack) for pack in parse_json(LEASE_KIND, content, entry.key)["packs"]]

    @property
    def _old(self) -> float:
        """Seconds after which signs are those of processes that died."""
        return max(self._quiet, QUIET_SECONDS)

    # -- small objects -----------------------------------------------------------------------

    def _clear(
        self, heads: Iterable[Entry], last: Survey, removed: Iterable[str], now: float
    ) -> None:
        """Remove the heads of what was removed, and what the dead have left."""
        live, ever = set[str](), set[str]()
        alive = set(self._view.live())
        for id, saved in self._view.saved.items():
            keys = {key for key in (saved.head, saved.layers) if key is not None}
            ever |= keys
            if id in alive:
                live |= keys
        there = set(last.packs) - set(removed)
        going = [
            entry.key
            for entry in heads
            if entry.key not in live and (entry.key in ever or now - entry.changed >= self._quiet)
        ]
        going += [
            moved_key(pack)
            for pack in last.moved
            if pack not in there and not last.through.get(pack)
        ]
        for folder in (LEASES, CONDEMNED, GC):
            going += [e.key for e in self._keeper.list(folder) if now - e.changed >= self._old]
        self._keeper.remove(going)
