"""Objects in a bucket, reached from every machine.

A small object is one request. A large one goes as a multipart upload, which nobody sees before it
is completed. That an object is put only where there is none is the server's work
(``If-None-Match``), and atomic for small ones everywhere; ``s3.claims`` says how it is made so for
large ones.

A key of at most ``PART`` bytes read in one run is one request; longer runs are cut, so that no
request takes longer than its timeout allows.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime

from sapwood.errors import NotFound, Truncated
from sapwood.storage.base import QUIET_SECONDS, Durability, Entry
from sapwood.storage.common import CommonKeeper, too_large
from sapwood.storage.keys import is_key
from sapwood.storage.ranges import Pieces, check_within, runs_of
from sapwood.storage.s3.claims import Claims
from sapwood.storage.s3.draft import PART, S3Draft
from sapwood.storage.s3.multipart import Multipart, OpenUpload
from sapwood.storage.s3.objects import Objects
from sapwood.storage.s3.place import S3Place
from sapwood.storage.s3.sigv4 import Credentials

__all__ = ["S3Keeper"]

_GAP = 2**20
"""Reading over more than this takes longer than another request beside the first."""
_OBJECTS = 8
"""Objects that are read side by side."""
_PARTS = 4
"""Parts of uploads that travel side by side."""


class S3Keeper(CommonKeeper):
    """Objects below a prefix of a bucket. Fulfils ``Keeper``."""

    durability = Durability.REPLICATED

    def __init__(
        self,
        url: str,
        *,
        endpoint: str | None = None,
        region: str | None = None,
        credentials: Credentials | None = None,
        timeout: float = 60.0,
        retries: int = 3,
    ) -> None:
        """Nothing is asked of the server before the first call; arguments are as ``S3Place.parse``.

        The bucket must be there.
        """
        self.place = S3Place.parse(
            url,
            endpoint=endpoint,
            region=region,
            credentials=credentials,
            timeout=timeout,
            retries=retries,
        )
        super().__init__(str(self.place))
        self.objects = Objects(self.place)
        self.multipart = Multipart(self.place)
        self.claims = Claims(self.objects)
        self._sending = threading.Lock()
        self._senders: ThreadPoolExecutor | None = None

    @property
    def senders(self) -> ThreadPoolExecutor:
        """Threads for parts of uploads; not those of ``seal``, which would wait for themselves."""
        with self._sending:
            if self._senders is None:
                self._senders = ThreadPoolExecutor(_PARTS, thread_name_prefix="sapwood-s3")
            return self._senders

    def _begin(
        self, key: str, nbytes: int | None, *, replace: bool, durability: Durability
    ) -> S3Draft:
        return S3Draft(self, key, nbytes, replace=replace)

    # -- reading -----------------------------------------------------------------------------

    def _size(self, key: str) -> int:
        size = self.objects.size(key)
        if size is None:
            raise self._absent(key)
        return size

    def _get(self, key: str, limit: int) -> bytes:
        try:
            found = self.objects.get_up_to(key, limit)
        except FileNotFoundError:
            raise self._absent(key) from None
        if isinstance(found, int):
            raise too_large(f"{self.place}/{key}", found, limit)
        return found

    def _read(self, wanted: Mapping[str, Pieces]) -> None:
        if len(wanted) == 1:
            for key, pieces in wanted.items():
                self._read_one(key, pieces)
            return
        threads = min(_OBJECTS, len(wanted))
        with ThreadPoolExecutor(threads, thread_name_prefix="sapwood-s3-read") as pool:
            for job in [pool.submit(self._read_one, *row) for row in wanted.items()]:
                job.result()

    def _read_one(self, key: str, pieces: Pieces) -> None:
        runs = runs_of(pieces, gap=_GAP)
        if not all(len(out) for _, out in pieces):
            check_within(key, self._size(key), pieces)
        if not runs:
            return
        cuts = [
            (run, at, min(PART, run.stop - at))
            for run in runs
            for at in range(run.start, run.stop, PART)
        ]
        try:
            found = self.objects.ranges(key, [(at, nbytes) for _, at, nbytes in cuts])
        except FileNotFoundError:
            raise self._absent(key) from None
        for (run, at, nbytes), data in zip(cuts, found, strict=True):
            memory = memoryview(data)
            if len(memory) != nbytes:
                raise Truncated(
                    f"{self.place}/{key} ends at byte {at + len(memory)}, but bytes up to "
                    f"{run.stop} were asked for; it was truncated, or whoever asks takes it for "
                    "another"
                )
            run.fill(at, memory)

    def _absent(self, key: str) -> NotFound:
        return NotFound(f"there is no {self.place}/{key}")

    # -- listing and removing ----------------------------------------------------------------

    def _list(self, folder: str) -> Iterable[Entry]:
        found = self.objects.entries(folder or None)
        return [Entry(k, one.size, one.changed) for k, one in found.items() if is_key(k)]

    def _remove(self, keys: Sequence[str], durability: Durability) -> None:
        self.objects.delete(keys)

    def sweep(self, quiet: float = QUIET_SECONDS) -> int:
        """Abort uploads to which nothing was sent for so long."""
        self._check_open()
        count = 0
        for one in self.multipart.open_uploads():
            if is_key(one.name) and self._silence(one) >= quiet:
                self.multipart.abort(one.name, one.upload)
                count += 1
        self.claims.clear(quiet)
        return count

    def _silence(self, one: OpenUpload) -> float:
        times = [one.started, *self.multipart.part_times(one.name, one.upload)]
        return time.time() - max(datetime.fromisoformat(text).timestamp() for text in times)

    def _end(self) -> None:
        with self._sending:
            senders, self._senders = self._senders, None
        if senders is not None:
            senders.shutdown(wait=True)
