"""An object of a bucket on its way: one request, or an upload of parts that travel side by side."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import TYPE_CHECKING

from sapwood.errors import AlreadyThere, StorageError
from sapwood.storage.common import CommonDraft
from sapwood.storage.s3.multipart import DataPart, UploadGoneError
from sapwood.storage.s3.objects import MARK

if TYPE_CHECKING:
    from sapwood.storage.s3.keeper import S3Keeper

__all__ = ["PART", "S3Draft"]

log = logging.getLogger(__name__)
PART = 16 * 2**20
"""The most that one request moves."""
_MOST_PARTS = 9000  # S3 allows 10,000


class S3Draft(CommonDraft):
    """Fulfils ``Draft``."""

    def __init__(self, keeper: S3Keeper, key: str, nbytes: int | None, *, replace: bool) -> None:
        """Nothing is asked of the server before there is a part to send."""
        super().__init__(keeper, key, nbytes, replace=replace)
        self._s3 = keeper
        self._part = max(PART, -(-(nbytes or 0) // _MOST_PARTS))
        self._mark = secrets.token_hex(16)
        self._held: list[memoryview] = []
        """Less than a part, waiting for more."""
        self._held_bytes = 0
        self._upload = ""
        self._sent: list[Future[str]] = []

    def _take(self, parts: Sequence[memoryview]) -> None:
        lent: list[Future[str]] = []
        try:
            for part in parts:
                self._take_one(part, lent)
            for job in lent:  # the memory is the caller's again
                job.result()
        except BaseException:
            self.discard()
            raise
        self._held = [part if _is_ours(part) else memoryview(bytes(part)) for part in self._held]

    def _take_one(self, part: memoryview, lent: list[Future[str]]) -> None:
        while part:
            room = self._part - self._held_bytes
            self._held.append(part[:room])
            self._held_bytes += len(self._held[-1])
            part = part[room:]
            # The last part of an object of known size may be all there is of it.
            if self._held_bytes == self._part and self.nbytes != self._part:
                lent.append(self._send())

    def _send(self) -> Future[str]:
        """Send what is held."""
        if not self._upload:
            self._begin()
        held, self._held, self._held_bytes = self._held, [], 0
        body = held[0] if len(held) == 1 else memoryview(b"".join(held))
        number = len(self._sent) + 1
        job = self._s3.senders.submit(
            self._s3.multipart.send, self.key, self._upload, number, DataPart(lambda: body)
        )
        self._sent.append(job)
        return job

    def _begin(self) -> None:
        if not self.replace and self._s3.objects.size(self.key) is not None:
            raise self._taken()
        self._upload = self._s3.multipart.begin(self.key, {MARK: self._mark})

    def _publish(self) -> None:
        if not self._upload:
            if not self._s3.objects.put_marked(
                self.key, self._held, self._mark, replace=self.replace
            ):
                raise self._taken()
            return
        if self._held:
            self._send()
        tags = [job.result() for job in self._sent]
        if self.replace:
            self._complete(tags)
            return
        if not self._s3.claims.get(self.key, self._mark):
            raise self._taken()
        try:
            self._complete(tags)
        finally:
            with suppress(StorageError):  # the next writer finds it old, or the object there
                self._s3.claims.drop(self.key)

    def _complete(self, tags: Sequence[str]) -> None:
        try:
            self._s3.multipart.complete(self.key, self._upload, tags, replace=self.replace)
        except (AlreadyThere, UploadGoneError) as error:
            # Was it we, in a request whose answer got lost?
            if self._s3.objects.mark(self.key) == self._mark:
                return
            if isinstance(error, AlreadyThere):
                raise self._taken() from None
            raise

    def _forget(self) -> None:
        self._held = []
        for job in self._sent:
            job.cancel()
        for job in self._sent:
            if not job.cancelled():
                job.exception()  # parts that come after the abort would open it again
        if self._upload:
            try:
                self._s3.multipart.abort(self.key, self._upload)
            except StorageError as error:
                log.warning("%s: an upload could not be aborted, sweep will: %s", self.key, error)

    def _taken(self) -> AlreadyThere:
        return AlreadyThere(f"{self._s3.place}/{self.key} is there already")


def _is_ours(part: memoryview) -> bool:
    return isinstance(part.obj, bytes)
