"""The store tier: every checkpoint is a version of a model in a repository.

The model's weights are the version's value, under their own names, so that ``sapwood store`` lists,
compares and loads them as any other model's; all else that a restore needs is kept with them. A
version appears when the shards of all ranks are there. Until then they wait as hidden versions,
from which a restore can read them, as from any tier that has not all of a checkpoint.
"""

from __future__ import annotations

import logging
import sqlite3
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from sapwood.errors import CheckpointError, ModelNotFound, NoRoom, SapwoodError, TierError
from sapwood.repository.base import Backend, Reclaiming
from sapwood.repository.names import Reference
from sapwood.tiers.base import Stored, StoredShard
from sapwood.tiers.leftovers import Stale
from sapwood.tiers.record import CheckpointId, ShardRecord
from sapwood.tiers.room import NoRoomError
from sapwood.tiers.versions.connection import Connection
from sapwood.tiers.versions.facts import Origin, named
from sapwood.tiers.versions.family import Saved, checkpoints_in, find_saved, model_name, parent_of
from sapwood.tiers.versions.index import Version, open_version
from sapwood.tiers.versions.leftover import clear, finish
from sapwood.tiers.versions.parts import CheckpointParts
from sapwood.tiers.versions.publishing import publish
from sapwood.tiers.versions.shard import VersionShard
from sapwood.tiers.versions.staging import open_staged, remove_staged, stage, staged_in

__all__ = ["VersionTier"]

log = logging.getLogger(__name__)


class VersionTier:
    """Checkpoints of one training as versions. Fulfils ``Tier``; owns its connection."""

    name = "store"

    def __init__(self, place: str, origin: Origin) -> None:
        """Nothing is opened, and nothing made, before the first call."""
        self.place, self.origin = place, origin
        self._connection = Connection(place)
        self._lock = threading.Lock()
        self._known: dict[CheckpointId, Reference] = {}
        self._finished_left = False
        self._last: Version | None = None
        """An earlier version, with which tensors that have not changed are shared."""

    # -- writing -----------------------------------------------------------------------------

    def put(self, record: ShardRecord, data: Any) -> None:
        """Keep a shard; if it is the last one, make the checkpoint a version."""
        memory = memoryview(data).cast("B")[: record.nbytes]
        with self._lock, self._guarded(f"write checkpoint {record.id} to"):
            self._connection.stay()
            with self._connection.using(create=True) as backend:
                assert backend is not None
                self._finish_left(backend, record.id)
                if not self._has(backend, record):
                    self._put(backend, record, memory)

    def _put(self, backend: Backend, record: ShardRecord, memory: memoryview) -> None:
        durability, origin = self._connection.durability, self.origin
        known = self._earlier(backend, record)
        if record.world == 1:
            parts = CheckpointParts.of_memory(record, memory)
            published = publish(backend, origin, parts, known, durability)
            self._remember(backend, published.reference)
            return
        stage(backend, origin, record, memory, known, durability)
        if finish(backend, origin, record.id, durability, known):
            self._reclaim(backend)
            self._last = None  # the next shard looks for the newest

    def _has(self, backend: Backend, record: ShardRecord) -> bool:
        """Whether the checkpoint is a version already, with this very shard."""
        run = model_name(Origin(series="", name=""), record.lineage)
        saved = find_saved(backend, self.origin, record.id, run)
        if saved is None:
            return False
        version = open_version(backend, saved.record.reference)
        if version.content(record.rank) != record.encode():
            raise TierError(f"{saved.record.reference} is complete and has another shard")
        remove_staged(backend, self.origin.series, record.id)
        return True

    def _finish_left(self, backend: Backend, but: CheckpointId) -> None:
        """Make versions of what an engine that died just before had almost done."""
        if self._finished_left:
            return
        for (_, id), shards in staged_in(backend, self.origin.series).items():
            if id == but:
                continue
            try:
                finish(backend, shards[0].origin, id, self._connection.durability)
            except SapwoodError as error:
                log.warning("checkpoint %s stays unfinished: %s", id, error)
        self._finished_left = True

    def _earlier(self, backend: Backend, record: ShardRecord) -> Version | None:
        """A version that tensors may be unchanged since: the one before, or the one restored."""
        last = self._last
        if (
            last is not None
            and last.backend is backend
            and last.facts.id.attempt == record.id.attempt
        ):
            return last
        parent = parent_of(backend, self.origin, record.id, record.lineage)
        return None if parent is None else self._remember(backend, parent.reference)

    def _remember(self, backend: Backend, reference: Reference) -> Version | None:
        try:
            self._last = open_version(backend, reference)
        except SapwoodError as error:
            log.warning("nothing is shared with %s: %s", reference, error)
            self._last = None
        return self._last

    # -- reading -----------------------------------------------------------------------------

    def shards(self) -> Sequence[Stored]:
        """The shards of every version, and those that wait for others."""
        with self._guarded("list"), self._connection.using() as backend:
            if backend is None:
                return []
            found = set()
            for saved in self._checkpoints(backend):
                id = saved.facts.id
                found |= {Stored(id, rank) for rank in range(saved.facts.world)}
            for (_, id), waiting in staged_in(backend, self.origin.series).items():
                found |= {Stored(id, one.rank) for one in waiting}
            return sorted(found)

    def trainings(self) -> list[Origin]:
        """The trainings that have saved to the repository, those of one name if there is one."""
        with self._guarded("list"), self._connection.using() as backend:
            if backend is None:
                return []
            found = {
                Origin(series=one.facts.series, name=named(one.facts.series)): one.record.created
                for one in checkpoints_in(backend, None, "*")
            }
            for shards in staged_in(backend).values():
                origin = shards[0].origin
                found[Origin(series=origin.series, name=origin.name)] = shards[0].created
            return [
                origin
                for origin in sorted(found, key=lambda one: (found[one], one.series))
                if self.origin.name in ("", origin.name)
            ]

    def _checkpoints(self, backend: Backend) -> list[Saved]:
        found = checkpoints_in(backend, self.origin)
        self._known = {saved.facts.id: saved.record.reference for saved in found}
        return found

    def open(self, stored: Stored) -> StoredShard:
        """Open a shard, in its version or where it waits."""
        backend = self._connection.hold()
        if backend is None:
            raise CheckpointError(f"there is no repository in {self.place}")
        try:
            return self._open(backend, stored)
        except BaseException:
            self._connection.release()
            raise

    def _open(self, backend: Backend, stored: Stored) -> StoredShard:
        what = f"shard {stored.rank} of {stored.id} in {self.place}"
        done = self._connection.release
        try:
            for _ in range(2):  # what waited may have become a version between the two looks
                version = self._version(backend, stored.id)
                if version is not None:
                    return VersionShard(version, stored.rank, done)
                with suppress(ModelNotFound):
                    return open_staged(
                        backend, self.origin.series, stored.id, stored.rank, done=done
                    )
        except CheckpointError:
            raise
        except SapwoodError as error:
            raise CheckpointError(f"{what} cannot be read: {error}") from error
        raise CheckpointError(f"{what} is not there")

    def _version(self, backend: Backend, id: CheckpointId) -> Version | None:
        """A checkpoint's version; looked for anew where it was removed meanwhile."""
        for _ in range(2):
            reference = self._known.get(id)
            if reference is not None:
                try:
                    version = open_version(backend, reference)
                except ModelNotFound:
                    pass
                else:
                    if version.facts.id == id:
                        return version
            self._checkpoints(backend)
            if id not in self._known:
                return None
        return None

    def record(self, stored: Stored) -> ShardRecord:
        """A shard's record, whatever has become of its tensors."""
        shard = self.open(stored)
        shard.close()
        return shard.record

    def verify_files(self, id: CheckpointId) -> None:
        """See that a version is a checkpoint whose tensors are those its records tell of.

        Raises:
            CheckpointError: it is not; that its bytes are right, reading its shards shows.
        """
        with self._connection.using() as backend:
            version = None if backend is None else self._version(backend, id)
            if version is None:
                return  # its shards wait
            catalog = version.shard_record(0).catalog
            for entry in catalog.entries:
                row = version.row(entry.key)
                if row is None or (row.shape, row.nbytes) != (entry.shape, entry.nbytes):
                    raise CheckpointError(
                        f"{version.record.reference} does not hold {entry.file} {entry.name} as "
                        "its records tell"
                    )

    # -- removing ----------------------------------------------------------------------------

    def pinned(self) -> set[CheckpointId]:
        """The checkpoints that have a tag: retention leaves them alone."""
        with self._guarded("list"), self._connection.using() as backend:
            if backend is None:
                return set()
            return {one.facts.id for one in self._checkpoints(backend) if one.record.tags}

    def drop(self, id: CheckpointId) -> None:
        """Remove a checkpoint's version, and what waits of it; what others share stays.

        Raises:
            TierError: it has a tag, or it cannot be done now.
        """
        with self._changing(f"remove checkpoint {id} from") as backend:
            if backend is None:
                return
            for saved in self._checkpoints(backend):
                if saved.facts.id == id:
                    self._remove(backend, saved)
            remove_staged(backend, self.origin.series, id)
            self._reclaim(backend)

    def _remove(self, backend: Backend, saved: Saved) -> None:
        record = saved.record
        if record.tags:
            raise TierError(
                f"{record.reference} is checkpoint {saved.facts.id} and has the tag "
                f"{record.tags[0]!r}: versions with tags stay; remove the tag first"
            )
        if self._last is not None and self._last.record.id == record.id:
            self._last = None
        try:
            backend.remove(record.reference)
        except ModelNotFound:  # somebody else does it
            log.debug("%s is gone already", record.reference)

    def abandon(self, id: CheckpointId) -> None:
        """Remove the shards of a checkpoint that will never be whole."""
        with self._changing(f"clear up after {id} in") as backend:
            if backend is not None and remove_staged(backend, self.origin.series, id):
                self._reclaim(backend)

    def clear(self, stale: Stale) -> list[CheckpointId]:
        """Finish or remove what killed runs left; see ``tiers.leftovers``."""
        with self._guarded("clear up"), self._connection.using() as backend:
            if backend is None:
                return []
            cleared = clear(
                backend,
                self._connection.durability,
                series=self.origin.series,
                covers=stale.covers,
                quiet=stale.quiet,
            )
            if cleared:
                self._reclaim(backend)
            return cleared

    def _reclaim(self, backend: Backend) -> None:
        """Give back the room of what was removed; where that takes long, ``gc`` does it."""
        if isinstance(backend, Reclaiming):
            backend.reclaim()

    def close(self) -> None:
        """End what runs in the background; the next process goes on with it."""
        self._last = None
        self._connection.close()

    @contextmanager
    def _changing(self, doing: str) -> Iterator[Backend | None]:
        with self._lock, self._guarded(doing), self._connection.using() as backend:
            yield backend

    @contextmanager
    def _guarded(self, doing: str) -> Iterator[None]:
        try:
            yield
        except TierError:
            raise
        except SapwoodError as error:
            kind = NoRoomError if _is_full(error) else TierError
            raise kind(f"cannot {doing} the repository {self.place}: {error}") from error
        except OSError as error:
            raise TierError(f"cannot {doing} {self.place}: {error.strerror or error}") from error


def _is_full(error: SapwoodError) -> bool:
    cause = error.__cause__
    code = getattr(cause, "sqlite_errorcode", None) if isinstance(cause, sqlite3.Error) else None
    return isinstance(error, NoRoom) or code == sqlite3.SQLITE_FULL
