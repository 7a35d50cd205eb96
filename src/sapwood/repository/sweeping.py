"""Giving back the room of what no model needs any more.

Safe beside readers and writers: a pack's row goes before its file, so that nobody is sent to what
is about to go; whoever was on the way there looks again and finds where its bytes are now; whoever
has it mapped keeps it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from sapwood.errors import NotFound
from sapwood.repository.catalog import Catalog, PackRow
from sapwood.repository.packs import FOLDER, lay_out, new_key, pieces
from sapwood.storage import Keeper, Wanted
from sapwood.storage.base import QUIET_SECONDS

__all__ = ["Swept", "reclaim", "sweep"]

_WORTH = 0.5
"""A pack of which less than this share is in use is written anew."""


@dataclass(frozen=True, kw_only=True)
class Swept:
    """What ``gc`` did."""

    packs: int
    """Packs that were removed."""
    freed: int
    """Bytes of packs that were removed, less those that were written anew."""
    drafts: int
    """Saves of processes that died before they were done."""
    live: int
    """Bytes that models refer to, each once."""


def sweep(
    catalog: Catalog,
    keeper: Keeper,
    *,
    quiet: float = QUIET_SECONDS,
    said: Callable[[str], None] = lambda _: None,
) -> Swept:
    """Remove what no model refers to; ``quiet`` as in ``Keeper.sweep``."""
    said("looking for saves that never ended")
    drafts = keeper.sweep(quiet)
    dead, written = _give_back(catalog, keeper, said)
    orphans = _orphans(catalog, keeper, quiet)
    keeper.remove(key for key, _ in orphans)
    return Swept(
        packs=len(dead) + len(orphans),
        freed=sum(row.nbytes for row in dead) + sum(size for _, size in orphans) - written,
        drafts=drafts,
        live=sum(row.live for row in catalog.packs()),
    )


def reclaim(catalog: Catalog, keeper: Keeper) -> int:
    """The part of it that needs no look at the keeper's files; bytes of packs that are freed."""
    dead, written = _give_back(catalog, keeper, lambda _: None)
    return sum(row.nbytes for row in dead) - written


def _give_back(
    catalog: Catalog, keeper: Keeper, said: Callable[[str], None]
) -> tuple[list[PackRow], int]:
    """Packs that were removed, and bytes that were written anew."""
    written = 0
    for row in catalog.packs():
        if 0 < row.live < _WORTH * row.nbytes:
            said(f"writing {row.key} anew: {row.live} of {row.nbytes} bytes are in use")
            written += _write_anew(catalog, keeper, row)
    said("removing packs that nothing refers to")
    dead = catalog.drop_dead_packs()
    keeper.remove(row.key for row in dead)
    return dead, written


def _write_anew(catalog: Catalog, keeper: Keeper, row: PackRow) -> int:
    """Move what is in use of a pack to a new one; bytes of that, none if another gc was first."""
    places = catalog.blobs_in(row.id)
    starts, nbytes = lay_out([place.nbytes for place in places])
    if nbytes >= row.nbytes:
        return 0
    key = new_key()
    with keeper.begin(key, nbytes) as draft:
        blobs = []
        for place in places:
            blob = memoryview(bytearray(place.nbytes))
            try:
                keeper.read([Wanted(row.key, place.start, blob)])
            except NotFound:
                return 0
            blobs.append(blob)
        draft.write_parts(pieces(starts, blobs))
        draft.publish()
    found = {place.blob: start for place, start in zip(places, starts, strict=True)}
    if not catalog.move(row.id, key, nbytes, found):
        keeper.remove([key])
        return 0
    return nbytes


def _orphans(catalog: Catalog, keeper: Keeper, quiet: float) -> list[tuple[str, int]]:
    """Packs that no catalog knows: their writers died before they could say so, or will yet."""
    entries = [e for e in keeper.list(FOLDER) if time.time() - e.changed >= quiet]
    known = {row.key for row in catalog.packs()}
    return [(entry.key, entry.nbytes) for entry in entries if entry.key not in known]
