"""Looking whether everything a repository promises is there and right."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from sapwood.errors import SapwoodError
from sapwood.repository.base import NOTHING
from sapwood.repository.catalog import Catalog, Place
from sapwood.repository.merging import digest_of
from sapwood.repository.names import HIDDEN
from sapwood.storage import Keeper, Wanted

__all__ = ["Verified", "verify"]


@dataclass
class Verified:
    """What ``verify`` found."""

    models: int = 0
    blobs: int = 0
    nbytes: int = 0
    unhashed: int = 0
    """Blobs that have no digest yet, so that only their size could be checked."""
    problems: list[str] = field(default_factory=list)
    """One line each; empty if all is well."""


def verify(
    catalog: Catalog, keeper: Keeper, *, said: Callable[[str], None] = lambda _: None
) -> Verified:
    """Read every byte once and compare it with its digest; count every reference."""
    found = Verified()
    users: dict[int, str] = {}
    counts: Counter[int] = Counter()
    for record in (*catalog.models(), *catalog.models(f"{HIDDEN}*")):
        found.models += 1
        try:
            _, manifest = catalog.manifest(record.reference)
        except SapwoodError as error:
            found.problems.append(f"{record.reference}: {error}")
            continue
        for name, number in (*manifest.names, *manifest.files):
            row = manifest.row(number)
            if row.blob != NOTHING:
                users.setdefault(row.blob, f"{record.reference} {name}")
        for blob in manifest.blobs:
            users.setdefault(blob, f"{record.reference}, what belongs to it beside the model")
        counts.update(blob for blob in manifest.blobs if blob != NOTHING)
    found.problems += catalog.miscounted(counts)
    for place, digest in catalog.blobs():
        user = users.get(place.blob, "a tensor that was merged")
        found.blobs += 1
        found.nbytes += place.nbytes
        said(f"reading {user}")
        found.problems += _problems(keeper, place, digest, user)
        found.unhashed += digest is None
    return found


def _problems(keeper: Keeper, place: Place, digest: bytes | None, user: str) -> Iterator[str]:
    memory = memoryview(bytearray(place.nbytes))
    try:
        keeper.read([Wanted(place.pack, place.start, memory)])
    except SapwoodError as error:
        yield f"{user}: {error}"
        return
    if digest is not None and digest_of(memory) != digest:
        yield (
            f"{user}: bytes {place.start} to {place.start + place.nbytes} of {place.pack} are not "
            "what was written: they do not match their digest"
        )
