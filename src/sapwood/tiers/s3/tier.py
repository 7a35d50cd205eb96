"""A bucket: the shards of all ranks, and the files they make up.

Under ``<prefix>/00000015-3f9a1c/`` there are

    shard-0.bin, shard-0.json     each rank's tensors as they were captured; its record, last
    shard-0.extras                what a rank saved beside tensors, if it is large
    model.safetensors, ...        the files any tool can read
    manifest.json                 put once the files are there, by one writer only
    claim.json                    who makes the files

and, once there is a manifest, the ``.bin`` objects go: every byte is in the files.

A checkpoint can be restored from shards and records alone as soon as all are there. The files are
made from the shards afterwards, by multipart upload, in which the server itself copies every run
of 5 MiB or more out of a shard (``UploadPartCopy``); only what is shorter is sent once more. So
every byte leaves its node once. The other way, each engine sending its own parts of the files,
would send every byte twice or could not promise a shard before all others are there, because
nothing of a multipart upload can be read until it is complete; and its parts would be too short
wherever a tensor's slices are.

A writer that dies leaves objects without a record, which nobody lists, and open uploads, which
``publish`` of the same checkpoint, ``drop``, ``clear`` and ``sweep`` abort. If it dies while it
makes the files, whoever publishes another checkpoint a quarter of an hour later makes them.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from datetime import UTC, datetime
from typing import Any

from sapwood.errors import CheckpointError, StorageError, TierError
from sapwood.storage.s3.multipart import Multipart, UploadGoneError
from sapwood.storage.s3.objects import Entry, Objects
from sapwood.storage.s3.place import S3Place
from sapwood.storage.s3.sigv4 import Credentials
from sapwood.tiers.base import Stored
from sapwood.tiers.leftovers import Stale
from sapwood.tiers.record import CheckpointId, ShardRecord
from sapwood.tiers.room import as_tier_errors
from sapwood.tiers.s3.manifests import manifest_name
from sapwood.tiers.s3.publish import Publisher, Source, record_name, stored_in
from sapwood.tiers.s3.shard import S3Shard, data_name, extras_name
from sapwood.tiers.s3.upload import upload_bytes

__all__ = ["S3Tier"]

log = logging.getLogger(__name__)
_CLAIM_SECONDS = 900.0
"""Who claimed to make the files and has not done so for so long is taken to be dead."""


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

    @as_tier_errors()
    def put(self, record: ShardRecord, data: Any) -> None:
        """Put the bytes, then the record; if that was the last one, publish the checkpoint."""
        stored = Stored(record.id, record.rank)
        memory = memoryview(data).cast("B")[: record.nbytes]
        with self._lock:
            safe = stored in self._safe
        if not safe:  # else an earlier try came as far as publishing
            if record.shard.nbytes:
                self._upload(data_name(record), memory[: record.shard.nbytes])
            if record.extras_bytes:
                self._upload(extras_name(record), memory[record.shard.extras_at :])
            self._objects.put(record_name(record.id, record.rank), record.encode())
            with self._lock:
                self._safe.add(stored)
        self._publish_last(record, memory)
        with self._lock:
            self._safe.discard(stored)

    @as_tier_errors()
    def publish(self, id: CheckpointId) -> bool:
        """Make a checkpoint's files and manifest, whoever claimed that; False if shards lack.

        For repair: a checkpoint whose last writer died is whole, but has no files yet; or a file
        is damaged, and shards were put again to mend it.

        Raises:
            CheckpointError: a file is damaged where no shard has its bytes any more.
        """
        world = self._whole(id)
        if world:
            made = self._made(id, world)
            self._publisher.publish(id, world)
            if made:
                self._publisher.verify(id, world)
        return world > 0

    @as_tier_errors()
    def verify_files(self, id: CheckpointId) -> int:
        """Compare the published files with the shards' checksums; bytes read.

        Raises:
            CheckpointError: a shard is missing, or a file is missing or damaged.
        """
        world = self._whole(id)
        if not world:
            raise CheckpointError(f"checkpoint {id} is not whole in {self.place}")
        return self._publisher.verify(id, world)

    @as_tier_errors()
    def shards(self) -> Sequence[Stored]:
        """Every shard whose record is there."""
        return stored_in(self._objects.names())

    @as_tier_errors()
    def record(self, stored: Stored) -> ShardRecord:
        """A shard's record, whatever has become of its bytes.

        Raises:
            CheckpointError: it is not there, or damaged.
        """
        name = record_name(stored.id, stored.rank)
        try:
            return ShardRecord.decode(self._objects.get(name), f"{self.place}/{name}")
        except FileNotFoundError as error:
            raise CheckpointError(f"there is no {self.place}/{name}") from error

    @as_tier_errors()
    def open(self, stored: Stored) -> S3Shard:
        """Read a shard's record, and see that its bytes are there."""
        record = self.record(stored)
        if record.extras_bytes:
            name = extras_name(record)
            self._check_size(name, self._objects.size(name), record.extras_bytes)
        data, expected = data_name(record), record.shard.nbytes
        size = self._objects.size(data) if expected else 0
        if size is None and (self._publisher.published(stored.id) or self._in_files(record)):
            return S3Shard(self._objects, record, published=True)
        self._check_size(data, size, expected)
        return S3Shard(self._objects, record, published=False)

    def _in_files(self, record: ShardRecord) -> bool:
        """Whether the files are there without a manifest, which somebody has removed.

        Shards go only when there is one, and what is read is compared with the record's checksums.
        """
        layouts = record.catalog.layouts.values()
        return all(
            self._objects.size(f"{record.id.folder}/{layout.filename}") == layout.size
            for layout in layouts
        )

    def _check_size(self, name: str, size: int | None, expected: int) -> None:
        if size != expected:
            what = "is missing" if size is None else f"has {size} bytes"
            raise CheckpointError(f"{self.place}/{name} {what}, its record says {expected}")

    @as_tier_errors()
    def drop(self, id: CheckpointId) -> None:
        """Take the records away first: a crash on the way leaves no shard that seems whole."""
        names = self._objects.names(id.folder)
        records = [record_name(id, stored.rank) for stored in stored_in(names)]
        manifest = [name for name in names if name == manifest_name(id)]
        self._objects.delete(records)
        self._objects.delete(manifest)
        self._publisher.abort_uploads(id)
        self._objects.delete([n for n in names if n not in {*records, *manifest}])

    @as_tier_errors()
    def sweep(self, older: float = 86400.0) -> int:
        """Abort uploads that were begun so many seconds ago, of whatever died; how many."""
        stale = [one for one in self._multipart.open_uploads() if _age(one.started) >= older]
        ours = [one for one in stale if CheckpointId.parse(one.name.partition("/")[0])]
        for one in ours:
            self._multipart.abort(one.name, one.upload)
        return len(ours)

    @as_tier_errors()
    def clear(self, stale: Stale) -> list[CheckpointId]:
        """Remove what killed runs left unfinished, and shards that are in files by now.

        See ``tiers.leftovers``; here the clock is the server's, which allows none to be far off.
        """
        cleared = set()
        for one in self._multipart.open_uploads():
            id = CheckpointId.parse(one.name.partition("/")[0])
            if id is not None and stale.covers(id) and _age(one.started) >= stale.quiet:
                self._multipart.abort(one.name, one.upload)
                cleared.add(id)
        for folder, entries in _by_folder(self._objects.entries()).items():
            id = CheckpointId.parse(folder)
            quiet = time.time() - max(entry.changed for entry in entries.values())
            if id is None or not stale.covers(id) or quiet < stale.quiet:
                continue
            if manifest_name(id) in entries:
                self._publisher.tidy(id)
            elif not self._readable(id):
                self.drop(id)
                cleared.add(id)
        return sorted(cleared)

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

    def _readable(self, id: CheckpointId) -> bool:
        try:
            return self._whole(id) > 0
        except CheckpointError:
            return False

    def _made(self, id: CheckpointId, world: int) -> bool:
        """Whether the files were made before: some of their bytes may be nowhere else."""
        if self._publisher.published(id):
            return True
        names = set(self._objects.names(id.folder))
        records = (self.record(Stored(id, rank)) for rank in range(world))
        return any(r.shard.nbytes and data_name(r) not in names for r in records)

    def _publish_last(self, record: ShardRecord, memory: memoryview) -> None:
        id = record.id
        try:
            if not set(range(record.world)) <= set(self._ranks(id)):
                return
            if self._publisher.published(id):
                self._publisher.tidy(id)
                return
            if not self._publisher.claim(id, record.rank):
                return
            self._publisher.publish(id, record.world, Source(record, memory))
        except (TierError, StorageError) as error:
            raise TierError(f"checkpoint {id} is whole, but its files are not: {error}") from error
        self._take_over(id)

    def _take_over(self, id: CheckpointId) -> None:
        """Make the files of checkpoints whose claimant died; ``id`` was published just now."""
        try:
            folders = _by_folder(self._objects.entries())
            now = max(entry.changed for entry in folders.get(id.folder, {}).values())
            for folder, entries in folders.items():
                other = CheckpointId.parse(folder)
                quiet = now - max(entry.changed for entry in entries.values())
                if other is None or manifest_name(other) in entries or quiet < _CLAIM_SECONDS:
                    continue
                if self.publish(other):
                    log.info("the files of checkpoint %s were made for one that died", other)
        except (TierError, StorageError, CheckpointError, ValueError) as error:
            log.warning("%s: files that others left unmade stay so: %s", self.place, error)


def _by_folder(entries: Mapping[str, Entry]) -> dict[str, dict[str, Entry]]:
    found: dict[str, dict[str, Entry]] = {}
    for name, entry in entries.items():
        found.setdefault(name.partition("/")[0], {})[name] = entry
    return found


def _age(started: str) -> float:
    moment = datetime.fromisoformat(started)
    return (datetime.now(UTC) - moment).total_seconds()
