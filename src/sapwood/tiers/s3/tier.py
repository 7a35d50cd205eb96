"""A bucket: the shards of all ranks, and the files they make up.

Under ``<prefix>/00000015-3f9a1c/`` there are

    shard-0.bin, shard-0.json     each rank's memory as it was captured, and its record, put last
    model.safetensors, ...        the files any tool can read
    manifest.json                 put once the files are there, by one writer only
    claim.json                    who makes the files

A checkpoint can be restored from shards and records alone as soon as all are there. The files are
made from the shards afterwards, by multipart upload, in which the server itself copies every run
of 5 MiB or more out of a shard (``UploadPartCopy``); only what is shorter is sent once more. So
every byte leaves its node once. The other way, each engine sending its own parts of the files,
would send every byte twice or could not promise a shard before all others are there, because
nothing of a multipart upload can be read until it is complete; and its parts would be too short
wherever a tensor's slices are.

A writer that dies leaves objects without a record, which nobody lists, and open uploads, which
``publish`` of the same checkpoint, ``drop`` and ``sweep`` abort.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Sequence
from contextlib import closing
from datetime import UTC, datetime
from typing import Any

from sapwood.errors import CheckpointError, TierError
from sapwood.tiers.base import Stored
from sapwood.tiers.record import CheckpointId, Range, ShardRecord
from sapwood.tiers.s3.multipart import Multipart, UploadGoneError
from sapwood.tiers.s3.objects import Objects
from sapwood.tiers.s3.place import S3Place
from sapwood.tiers.s3.publish import Publisher, Source, data_name, record_name, stored_in
from sapwood.tiers.s3.sigv4 import Credentials
from sapwood.tiers.s3.upload import upload_bytes

__all__ = ["S3Shard", "S3Tier"]

_FIRST_BLOCK, _LAST_BLOCK = 2**20, 32 * 2**20


class S3Tier:
    """Shards in a bucket, reached by every node. Fulfils ``Tier``."""

    name = "s3"

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
        """Nothing is asked of the server before the first call.

        Args:
            url: ``s3://bucket/prefix``; the bucket must be there.
            endpoint: of the server; else AWS_ENDPOINT_URL_S3, AWS_ENDPOINT_URL, or Amazon's.
            region: else AWS_REGION, or us-east-1.
            credentials: else AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_SESSION_TOKEN.
            timeout: seconds a request may take.
            retries: how often a request is tried again.
        """
        self.place = S3Place.parse(
            url,
            endpoint=endpoint,
            region=region,
            credentials=credentials,
            timeout=timeout,
            retries=retries,
        )
        self._objects = Objects(self.place)
        self._multipart = Multipart(self.place)
        self._publisher = Publisher(self._objects, self._multipart)
        self._lock = threading.Lock()
        self._safe: set[Stored] = set()

    def put(self, record: ShardRecord, data: Any) -> None:
        """Put the bytes, then the record; if that was the last one, publish the checkpoint."""
        stored = Stored(record.id, record.rank)
        memory = memoryview(data).cast("B")[: record.nbytes]
        with self._lock:
            safe = stored in self._safe
        if not safe:  # else an earlier try came as far as publishing
            if memory:
                self._upload(data_name(record.id, record.rank), memory)
            self._objects.put(record_name(record.id, record.rank), record.encode())
            with self._lock:
                self._safe.add(stored)
        self._publish_last(record, memory)
        with self._lock:
            self._safe.discard(stored)

    def publish(self, id: CheckpointId) -> bool:
        """Make a checkpoint's files and manifest, whoever claimed that; False if shards lack.

        For repair: a checkpoint whose last writer died is whole, but has no files yet.
        """
        world = self._whole(id)
        if world:
            self._publisher.publish(id, world)
        return world > 0

    def verify_files(self, id: CheckpointId) -> int:
        """Compare the published files with the shards' checksums; bytes read.

        Raises:
            CheckpointError: a shard is missing, or a file is missing or damaged.
        """
        world = self._whole(id)
        if not world:
            raise CheckpointError(f"checkpoint {id} is not whole in {self.place}")
        return self._publisher.verify(id, world)

    def shards(self) -> Sequence[Stored]:
        """Every shard whose record is there."""
        return stored_in(self._objects.names())

    def open(self, stored: Stored) -> S3Shard:
        """Read a shard's record, and see that its bytes are there."""
        name = record_name(stored.id, stored.rank)
        try:
            record = ShardRecord.decode(self._objects.get(name), f"{self.place}/{name}")
        except FileNotFoundError as error:
            raise CheckpointError(f"there is no {self.place}/{name}") from error
        data = data_name(stored.id, stored.rank)
        size = self._objects.size(data) if record.nbytes else 0
        if size != record.nbytes:
            what = "is missing" if size is None else f"has {size} bytes"
            raise CheckpointError(f"{self.place}/{data} {what}, its record says {record.nbytes}")
        return S3Shard(self._objects, data, record)

    def drop(self, id: CheckpointId) -> None:
        """Take the records away first: a crash on the way leaves no shard that seems whole."""
        names = self._objects.names(id.folder)
        records = [record_name(id, stored.rank) for stored in stored_in(names)]
        manifest = [name for name in names if name.endswith("/manifest.json")]
        self._objects.delete(records)
        self._objects.delete(manifest)
        self._publisher.abort_uploads(id)
        self._objects.delete([n for n in names if n not in {*records, *manifest}])

    def sweep(self, older: float = 86400.0) -> int:
        """Abort uploads that were begun so many seconds ago, of whatever died; how many."""
        stale = [one for one in self._multipart.open_uploads() if _age(one.started) >= older]
        ours = [one for one in stale if CheckpointId.parse(one.name.partition("/")[0])]
        for one in ours:
            self._multipart.abort(one.name, one.upload)
        return len(ours)

    def close(self) -> None:
        """Nothing runs."""

    def _upload(self, name: str, memory: memoryview) -> None:
        """Put the bytes; once more if somebody who published meanwhile took the upload away."""
        try:
            upload_bytes(self._objects, self._multipart, name, memory)
        except UploadGoneError:
            upload_bytes(self._objects, self._multipart, name, memory)

    def _ranks(self, id: CheckpointId) -> list[int]:
        """The ranks whose shards of a checkpoint are here."""
        return [stored.rank for stored in stored_in(self._objects.names(id.folder))]

    def _whole(self, id: CheckpointId) -> int:
        """How many ranks saved a checkpoint; 0 if a shard is missing."""
        ranks = self._ranks(id)
        if not ranks:
            return 0
        with closing(self.open(Stored(id, ranks[0]))) as first:
            world = first.record.world
        return world if set(range(world)) <= set(ranks) else 0

    def _publish_last(self, record: ShardRecord, memory: memoryview) -> None:
        id = record.id
        try:
            if not set(range(record.world)) <= set(self._ranks(id)):
                return
            if self._publisher.published(id) or not self._publisher.claim(id, record.rank):
                return
            self._publisher.publish(id, record.world, Source(record, memory))
        except TierError as error:
            raise TierError(f"checkpoint {id} is whole, but its files are not: {error}") from error


class S3Shard:
    """A shard in two objects. Fulfils ``StoredShard``.

    It reads ahead, the further the longer it is read in order: a tiny tensor costs one small
    request, and many tiny tensors do not cost one each.
    """

    def __init__(self, objects: Objects, name: str, record: ShardRecord) -> None:
        """Made by ``S3Tier``."""
        self.record = record
        self._objects = objects
        self._name = name
        self._start = 0
        self._block = memoryview(b"")
        self._next = _FIRST_BLOCK
        self._ends = [part.at + part.nbytes for part in record.ranges]

    def read_into(self, part: Range, out: Any) -> None:
        """Read a range, from what was read ahead if it is there."""
        target = memoryview(out).cast("B")
        if not target:
            return
        at = part.at - self._start
        if not 0 <= at <= len(self._block) - len(target):
            self._fetch(part.at, len(target))
            at = 0
        target[:] = self._block[at : at + len(target)]

    def close(self) -> None:
        """Forget what was read ahead."""
        self._block = memoryview(b"")

    def _fetch(self, start: int, nbytes: int) -> None:
        in_order = start >= self._start and start <= self._start + len(self._block) + 64
        self._next = min(2 * self._next, _LAST_BLOCK) if in_order else _FIRST_BLOCK
        # Whole ranges only: half of one at the end would be asked for again.
        last = bisect_right(self._ends, start + self._next) - 1
        length = max(nbytes, self._ends[last] - start if last >= 0 else 0)
        block = memoryview(bytearray(length))
        self._block = memoryview(b"")
        try:
            self._objects.read(self._name, start, block)
        except (FileNotFoundError, TierError, ValueError) as error:
            raise CheckpointError(
                f"cannot read bytes {start} to {start + length} of {self._name}: {error}"
            ) from error
        self._start, self._block = start, block


def _age(started: str) -> float:
    moment = datetime.fromisoformat(started)
    return (datetime.now(UTC) - moment).total_seconds()
