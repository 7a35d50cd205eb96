"""Objects in Mooncake Store: the memory of the clients that give some to the cluster.

An object there begins with a head of ours: who put it, when, and how large it is. Mooncake says
that all is well to whoever puts under a key that is taken, and keeps what was there; the head tells
who was first. It is gone with the memory it lies in, so it promises no more than ``MEMORY``.

Everything a call reads is asked for in one request, however many objects and ranges that are.
"""

from __future__ import annotations

import secrets
import struct
import time
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from sapwood.errors import AlreadyThere, Damaged, NotFound, StorageError, Unreachable
from sapwood.storage.base import Durability, Entry
from sapwood.storage.common import CommonDraft, CommonKeeper, too_large
from sapwood.storage.keys import is_key
from sapwood.storage.mooncake.client import (
    ABSENT,
    BEYOND,
    NOT_READY,
    OVERTAKEN,
    TAKEN,
    Client,
    Row,
    check_process,
    dismissed,
    failure,
    hired,
)
from sapwood.storage.mooncake.place import MooncakePlace
from sapwood.storage.preads import replaced
from sapwood.storage.ranges import Pieces, Run, check_within, runs_of

__all__ = ["MooncakeKeeper"]

_HEAD = struct.Struct("<8s16sdQ")  # magic, mark of the writer, time, bytes
_MAGIC = b"SWMOON1\0"
_GAP = 4096
_REQUEST = 64 * 2**20
"""The most that one request reads, so that it ends in time and needs no more memory."""
_LISTED = 1000
_SOON = 1.0
"""Seconds that a reader gives an object that is being replaced to be there again."""
_PATIENCE = 90.0
"""Seconds until Mooncake has given up a put whose writer died, and some more."""
_PAUSE = 0.002


class MooncakeKeeper(CommonKeeper):
    """Objects below a prefix of a cluster. Fulfils ``Keeper``."""

    durability = Durability.MEMORY

    def __init__(
        self,
        url: str,
        *,
        local: str | None = None,
        protocol: str | None = None,
        device: str | None = None,
        segment: int = 0,
        replicas: int = 1,
        timeout: float = 30.0,
    ) -> None:
        """Connect to ``mooncake://host:port/prefix?metrics=9003``; arguments as ``MooncakePlace``.

        Raises:
            ConfigError: Mooncake cannot be loaded, or there is no such place.
            Unreachable: its master does not answer.
        """
        self.place = MooncakePlace.parse(
            url,
            local=local,
            protocol=protocol,
            device=device,
            segment=segment,
            replicas=replicas,
            timeout=timeout,
        )
        super().__init__(str(self.place))
        self._client = hired(self.place)
        self._unready: dict[str, float] = {}
        """Since when an object is under way. Mooncake cannot tell one that is being replaced from
        one whose first writer has died: that is waited for once, and is none from then on."""

    @property
    def client(self) -> Client:
        """The connection; only in the process that made it."""
        check_process(self._client, self.place)
        return self._client

    def _end(self) -> None:
        dismissed(self.place, self._client)

    # -- writing -----------------------------------------------------------------------------

    def _begin(
        self, key: str, nbytes: int | None, *, replace: bool, durability: Durability
    ) -> _MooncakeDraft:
        if not replace and self.client.size(self.place.key(key)) >= 0:
            raise self._taken(key)
        return _MooncakeDraft(self, key, nbytes, replace=replace)

    def put_whole(self, key: str, data: npt.NDArray[np.uint8], *, replace: bool) -> None:
        """Put an object whose first bytes are left for its head."""
        mark, full = secrets.token_bytes(16), self.place.key(key)
        head = _HEAD.pack(_MAGIC, mark, time.time(), data.nbytes - _HEAD.size)
        data[: _HEAD.size] = np.frombuffer(head, np.uint8)
        deadline = time.monotonic() + _PATIENCE
        while True:
            code = self.client.put(full, data, replace=replace)
            if code and code not in (TAKEN, NOT_READY, OVERTAKEN):
                raise failure(self.place, f"put {key}", code)
            if not code and replace:
                return
            found = self._mark(key)
            if found == mark:
                return
            if found is not None and not replace:
                raise self._taken(key)
            # Another writer is under way, or has died; what it began is given up some time.
            if time.monotonic() > deadline:
                raise Unreachable(
                    f"{self.place}: {key} is being put by somebody who does not come to an end"
                )
            time.sleep(_PAUSE)

    def _mark(self, key: str) -> bytes | None:
        """Who put an object; None if nobody has, wholly."""
        head = np.empty(_HEAD.size, np.uint8)
        ((code,),) = self.client.read([(self.place.key(key), [(0, 0, _HEAD.size)])], head)
        if code in (ABSENT, NOT_READY):
            return None
        if code != _HEAD.size:
            raise failure(self.place, f"read {key}", code)
        return self._parsed(key, head)[0]

    def _parsed(self, key: str, head: npt.NDArray[np.uint8]) -> tuple[bytes, float, int]:
        """Mark, time and size."""
        magic, mark, changed, nbytes = _HEAD.unpack(head.tobytes())
        if magic != _MAGIC:
            raise Damaged(f"{self.place}/{key} was not put there by Sapwood")
        return mark, changed, nbytes

    def _taken(self, key: str) -> AlreadyThere:
        return AlreadyThere(f"{self.place}/{key} is there already")

    # -- reading -----------------------------------------------------------------------------

    def _size(self, key: str) -> int:
        while (size := self.client.size(self.place.key(key))) == NOT_READY and self._waits(key):
            time.sleep(_PAUSE)
        if size >= 0:
            self._unready.pop(key, None)
        if size in (ABSENT, NOT_READY):
            raise self._absent(key)
        if size < _HEAD.size:
            raise failure(self.place, f"look at {key}", size)
        return size - _HEAD.size

    def _get(self, key: str, limit: int) -> bytes:
        while True:
            size = self._size(key)
            if size > limit:
                raise too_large(f"{self.place}/{key}", size, limit)
            out = bytearray(size)
            heads = self._request([(key, [(0, memoryview(out))])])
            if heads[key][1] == size:
                return bytes(out)
            # It was replaced in between by one of another size.

    def _read(self, wanted: Mapping[str, Pieces]) -> None:
        marks: dict[str, bytes] = {}
        for some in _requests(wanted):
            for key, (mark, _) in self._request(some).items():
                if marks.setdefault(key, mark) != mark:
                    raise replaced(f"{self.place}/{key}")

    def _request(self, wanted: Sequence[tuple[str, Pieces]]) -> dict[str, tuple[bytes, int]]:
        """Fill buffers by one request; mark and size of each object."""
        plan: list[tuple[str, Pieces, list[Run], int]] = []
        rows: list[tuple[str, list[Row]]] = []
        at = 0
        for key, pieces in wanted:
            runs, start = runs_of(pieces, gap=_GAP), at
            mine = [(0, at, _HEAD.size)]
            at += _HEAD.size
            for run in runs:
                mine.append((_HEAD.size + run.start, at, run.stop - run.start))
                at += run.stop - run.start
            plan.append((key, pieces, runs, start))
            rows.append((self.place.key(key), mine))
        out = np.empty(at, np.uint8)
        self._fetch([key for key, *_ in plan], rows, out, wanted)
        found: dict[str, tuple[bytes, int]] = {}
        for key, pieces, runs, start in plan:
            mark, _, nbytes = self._parsed(key, out[start : start + _HEAD.size])
            check_within(f"{self.place}/{key}", nbytes, pieces)
            found[key] = mark, nbytes
            at = start + _HEAD.size
            for run in runs:
                size = run.stop - run.start
                run.fill(run.start, out[at : at + size].data)
                at += size
        return found

    def _fetch(
        self,
        keys: Sequence[str],
        rows: Sequence[tuple[str, Sequence[Row]]],
        out: npt.NDArray[np.uint8],
        wanted: Sequence[tuple[str, Pieces]],
    ) -> None:
        while True:
            codes = [
                (key, min(some))
                for key, some in zip(keys, self.client.read(rows, out), strict=True)
            ]
            bad = [(key, code) for key, code in codes if code < 0]
            if not bad:
                for key in keys:
                    self._unready.pop(key, None)
                return
            key, code = next(((k, c) for k, c in bad if c != NOT_READY), bad[0])
            if code == NOT_READY and self._waits(key):
                time.sleep(_PAUSE)
                continue
            if code in (ABSENT, NOT_READY):
                raise self._absent(key)
            if code == BEYOND:
                check_within(f"{self.place}/{key}", self._size(key), dict(wanted)[key])
            raise failure(self.place, f"read {key}", code)

    def _waits(self, key: str) -> bool:
        return time.monotonic() - self._unready.setdefault(key, time.monotonic()) < _SOON

    def _absent(self, key: str) -> NotFound:
        return NotFound(f"there is no {self.place}/{key}")

    # -- listing and removing ----------------------------------------------------------------

    def _list(self, folder: str) -> Iterable[Entry]:
        start = f"{self.place.prefix}/" if self.place.prefix else ""
        names = [key[len(start) :] for key in self.client.all_keys() if key.startswith(start)]
        inside = f"{folder}/" if folder else ""
        keys = [name for name in names if is_key(name) and name.startswith(inside)]
        found: list[Entry] = []
        for at in range(0, len(keys), _LISTED):
            found += self._entries(keys[at : at + _LISTED])
        return found

    def _entries(self, keys: Sequence[str]) -> Iterable[Entry]:
        size = _HEAD.size
        out = np.empty(size * len(keys), np.uint8)
        rows = [(self.place.key(key), [(0, n * size, size)]) for n, key in enumerate(keys)]
        for n, ((code,), key) in enumerate(zip(self.client.read(rows, out), keys, strict=True)):
            if code == size:
                _, changed, nbytes = self._parsed(key, out[n * size : n * size + size])
                yield Entry(key, nbytes, changed)
            elif code not in (ABSENT, NOT_READY):
                raise failure(self.place, f"look at {key}", code)

    def _remove(self, keys: Sequence[str], durability: Durability) -> None:
        codes = self.client.remove([self.place.key(key) for key in keys])
        for key, code in zip(keys, codes, strict=True):
            if code and code not in (ABSENT, NOT_READY):
                raise failure(self.place, f"remove {key}", code)


class _MooncakeDraft(CommonDraft):
    """An object in this process's memory until it is put whole. Fulfils ``Draft``."""

    def __init__(
        self, keeper: MooncakeKeeper, key: str, nbytes: int | None, *, replace: bool
    ) -> None:
        super().__init__(keeper, key, nbytes, replace=replace)
        self._mooncake = keeper
        self._data = self._new(nbytes or 0)

    def _new(self, nbytes: int) -> npt.NDArray[np.uint8]:
        try:
            return np.empty(_HEAD.size + nbytes, np.uint8)
        except MemoryError as error:
            raise StorageError(f"no memory for {nbytes} bytes of {self.key}") from error

    def _take(self, parts: Sequence[memoryview]) -> None:
        at = _HEAD.size + self.written
        end = at + sum(map(len, parts))
        if end > self._data.nbytes:
            larger = self._new(max(end, 2 * self._data.nbytes) - _HEAD.size)
            larger[:at] = self._data[:at]
            self._data = larger
        for part in parts:
            self._data[at : at + len(part)] = np.frombuffer(part, np.uint8)
            at += len(part)

    def _publish(self) -> None:
        whole = self._data[: _HEAD.size + self.written]
        self._mooncake.put_whole(self.key, whole, replace=self.replace)
        self._data = self._data[:0]

    def _forget(self) -> None:
        self._data = self._data[:0]


def _requests(wanted: Mapping[str, Pieces]) -> Iterable[list[tuple[str, Pieces]]]:
    """Pieces in groups of at most ``_REQUEST`` bytes; large ones are cut."""
    group: dict[str, list[tuple[int, memoryview]]] = {}
    room = _REQUEST
    for key, pieces in wanted.items():
        for start, out in sorted(pieces, key=lambda piece: piece[0]):
            at = 0
            while True:
                part = out[at : at + room]
                group.setdefault(key, []).append((start + at, part))
                room -= len(part)
                at += len(part)
                if room <= 0:
                    yield list(group.items())
                    group, room = {}, _REQUEST
                if at >= len(out):
                    break
    if group:
        yield list(group.items())
