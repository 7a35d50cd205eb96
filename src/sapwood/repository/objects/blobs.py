"""The numbers by which this process knows runs of bytes, and where those lie now.

Equal bytes have one number, whatever versions they are in. A place is where a version's head said
that they lie; where the pack is gone, ``moved`` says where gc has put them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from sapwood.errors import Damaged, Gone, NotFound, StorageError, Truncated
from sapwood.repository.base import BlobPart
from sapwood.repository.merging import mark_of
from sapwood.repository.objects.head import BlobRow
from sapwood.repository.objects.layout import LARGEST, framed_json, moved_key, parse_json
from sapwood.storage import Keeper, Wanted

__all__ = ["Blob", "Blobs", "Spot", "decode_moved", "encode_moved"]

_KIND = b"MV"
_TRIES = 4
Spot = tuple[str, int]
"""A pack, and where in it."""


@dataclass(slots=True)
class Blob:
    """A run of bytes that this process knows."""

    row: BlobRow
    spots: list[Spot]
    """Where it may lie, the likeliest first; changed as a whole, so that no lock is needed."""
    users: list[tuple[int, str]] = field(default_factory=list)
    """Versions that have it, with the tensor's name, the last one first."""


def encode_moved(pack: str, spots: Mapping[bytes, Spot]) -> bytes:
    """The object that says where the tensors of a pack are now, by digest."""
    rows = [[digest.hex(), *spot] for digest, spot in sorted(spots.items())]
    return framed_json(_KIND, {"pack": pack, "blobs": rows})


def decode_moved(content: bytes, key: str) -> tuple[str, dict[bytes, Spot]]:
    """The reverse.

    Raises:
        Damaged: it is not what was written; names the key.
    """
    found = parse_json(_KIND, content, key)
    try:
        spots = {bytes.fromhex(d): (str(p), int(s)) for d, p, s in found["blobs"]}
        return str(found["pack"]), spots
    except (KeyError, TypeError, ValueError) as error:
        raise Damaged(f"{key} is damaged: {error!r}") from error


class Blobs:
    """All runs of bytes this process has heard of. Safe in threads, and after a fork."""

    def __init__(self) -> None:
        """Empty."""
        self._numbers: dict[bytes, int] = {}
        self._blobs: dict[int, Blob] = {}
        self._next = itertools.count()

    def number(
        self, row: BlobRow, user: tuple[int, str] | None = None, *, apart: bool = False
    ) -> int:
        """The number of a version's run of bytes; ``apart``: another one for each place."""
        spot = (row.pack, row.start)
        key = row.digest + f"{spot}".encode() if apart else row.digest
        number = self._numbers.get(key)
        if number is None:
            number = next(self._next)
            self._blobs[number] = Blob(row, [spot])
            # Of threads that come at once, one has given it its number.
            number = self._numbers.setdefault(key, number)
        blob = self._blobs[number]
        if spot not in blob.spots:
            blob.spots = [spot, *blob.spots][:8]
        if user is not None and user not in blob.users:
            blob.users = [user, *blob.users][:8]
        return number

    def known(self, digest: bytes) -> int | None:
        """The number of these bytes, if this process has heard of them."""
        return self._numbers.get(digest)

    def __getitem__(self, number: int) -> Blob:
        """All about one.

        Raises:
            Gone: there never was such a number.
        """
        found = self._blobs.get(number)
        if found is None:
            raise Gone(f"blob {number} is not known here: it belongs to another repository")
        return found

    def forget_spot(self, number: int, spot: Spot) -> None:
        """It does not lie there any more."""
        blob = self[number]
        blob.spots = [one for one in blob.spots if one != spot]

    # -- reading -----------------------------------------------------------------------------

    def read(self, keeper: Keeper, parts: Sequence[BlobPart], *, check: bool = True) -> None:
        """Fill buffers, those of one pack in one call of the keeper.

        Raises:
            NotFound: the bytes of a blob are nowhere; its number is ``args[1]``.
            Damaged: they are there, and are not what was written.
        """
        for attempt in range(_TRIES):
            wanted = [self._wanted(part) for part in parts]
            try:
                keeper.read(wanted)
            except NotFound:
                if attempt == _TRIES - 1:
                    raise
                self._look_again(keeper, {one.key for one in wanted})
            except Truncated as error:
                raise Damaged(f"{self._cut(keeper, parts)}: {error}") from error
            else:
                break
        if check:
            self._check(parts)

    def _wanted(self, part: BlobPart) -> Wanted:
        blob = self[part.blob]
        if part.start < 0 or part.start + len(part.out) > blob.row.nbytes:
            raise Damaged(
                f"a tensor of {blob.row.nbytes} bytes was asked for {part.start} to "
                f"{part.start + len(part.out)}: its manifest does not belong to it"
            )
        if not blob.spots:
            raise NotFound(f"{self.who(part.blob)}: its bytes are nowhere", part.blob)
        pack, start = blob.spots[0]
        return Wanted(pack, start + part.start, part.out)

    def _look_again(self, keeper: Keeper, packs: Iterable[str]) -> None:
        for pack in packs:
            try:
                keeper.size(pack)
            except NotFound:
                self.take_moved(keeper, pack)

    def take_moved(self, keeper: Keeper, pack: str) -> None:
        """A pack is gone: take over where its tensors are now."""
        key, spots = moved_key(pack), dict[bytes, Spot]()
        with suppress(NotFound):
            _, spots = decode_moved(keeper.get(key, limit=LARGEST), key)
        for number, blob in list(self._blobs.items()):
            mine = [one for one in blob.spots if one[0] == pack]
            if mine:
                new = spots.get(blob.row.digest)
                rest = [one for one in blob.spots if one[0] != pack and one != new]
                self._blobs[number].spots = [new, *rest] if new is not None else rest

    def _cut(self, keeper: Keeper, parts: Sequence[BlobPart]) -> str:
        """Whose tensor ends too early."""
        for part in parts:
            pack, start = self[part.blob].spots[0]
            with suppress(StorageError):
                if keeper.size(pack) < start + part.start + len(part.out):
                    return self.who(part.blob)
        return "a tensor"

    def _check(self, parts: Sequence[BlobPart]) -> None:
        """Whole tensors are compared with their fast checksum, which costs less than they did."""
        for part in parts:
            row = self[part.blob].row
            if row.mark and len(part.out) == row.nbytes and mark_of(part.out) != row.mark:
                pack, start = self[part.blob].spots[0]
                raise Damaged(
                    f"{self.who(part.blob)}: bytes {start} to {start + row.nbytes} of {pack} are "
                    "not what was written: they do not match their checksum"
                )

    def who(self, number: int) -> str:
        """Which tensor it is, for messages."""
        users = self[number].users
        return users[0][1] if users else f"blob {number}"
