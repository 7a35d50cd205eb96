"""A folder on a file system all nodes share, where a checkpoint becomes a few standard files.

    00000015-3f9a1c.partial/     what the engines of all nodes write to, each its own bytes
        model.safetensors
        optimizer.safetensors
        shard-0.extras ...       what a rank saved beside tensors, if it is large
        shard-0.json ...         a rank's record, when its bytes are on the device
    00000015-3f9a1c/             the same folder, renamed when all records are there
        manifest.json            what belongs to it; made just before
    00000014-3f9a1c.dropped/     being removed

The engines need no word from each other: whoever finds the records of all ranks finishes the
checkpoint, and several may do it at once.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from sapwood.errors import CheckpointError, TierError
from sapwood.regular import read_regular
from sapwood.storage.files import Files, HeldFolder
from sapwood.tiers.assembly import (
    AssembledShard,
    check_manifest,
    check_published,
    write_pieces,
)
from sapwood.tiers.base import Stored
from sapwood.tiers.leftovers import Stale, clock_of
from sapwood.tiers.local import entries_in, older_rests, ranks_in, record_name, remove_rest
from sapwood.tiers.manifest import MANIFEST, Manifest, check_agreement, join
from sapwood.tiers.record import CheckpointId, ShardRecord
from sapwood.tiers.room import tier_error

__all__ = ["ExternalTier"]

log = logging.getLogger(__name__)
T = TypeVar("T")
PARTIAL, DROPPED = ".partial", ".dropped"


class ExternalTier:
    """Checkpoints in a folder that the engines of all nodes write to. Fulfils ``Tier``."""

    name = "external"

    def __init__(self, folder: Path, files: Files | None = None) -> None:
        """``folder`` is made when the first shard comes."""
        self.folder = folder
        self._files = files or Files()

    # -- writing -----------------------------------------------------------------------------

    def put(self, record: ShardRecord, data: Any) -> None:
        """Write the shard's bytes, then its record; if it is the last one, finish the checkpoint.

        Raises:
            TierError: it could not be done, or other ranks have saved another model.
        """
        content = record.encode()

        def work() -> None:
            if not self._has(record, content):
                try:
                    self._write(record, data, content)
                except FileNotFoundError:
                    # Published between our record and its sync? Then it is in there.
                    if not self._has(record, content):
                        raise
            self._finish(record.id, str(record.rank), record)

        self._guarded(f"write checkpoint {record.id} in", work)

    def _has(self, record: ShardRecord, content: bytes) -> bool:
        """Whether this very shard is there already; another one under its name gives way."""
        name = record_name(record.rank)
        home, there = self._read(record.id, name)
        if there == content:
            # It may have been written without its name having reached the device.
            with suppress(FileNotFoundError):  # published just now, which syncs it too
                self._files.sync_folder(home)
            return True
        if there is not None:
            if home == self._final(record.id):
                raise TierError(f"{home} is complete and has another shard {record.rank}")
            self._files.remove(home / name)
            self._files.sync_folder(home)
        return False

    def _read(self, id: CheckpointId, name: str) -> tuple[Path, bytes | None]:
        """A file of a checkpoint, wherever it is while others may be renaming its folder."""
        final, partial = self._final(id), self._partial(id)
        for home in (final, partial, final):
            with suppress(FileNotFoundError):
                return home, read_regular(home / name)
        return final, None

    def _write(self, record: ShardRecord, data: Any, content: bytes) -> None:
        home = self._partial(record.id)
        self._files.make_folder(home)
        for rank in ranks_in(home)[:1]:
            # Before our bytes go where, by another catalog, somebody else's are.
            there = {rank: read_regular(home / record_name(rank))}
            check_agreement(there, record, str(home))
        with HeldFolder(home) as held:
            write_pieces(self._files, home, record, data)
            # Names need not reach the device in the order they were given: data first, for sure.
            self._files.sync_folder(home)
            path = home / record_name(record.rank)
            self._files.write_whole(path, content, writer="put", held=held)

    # -- finishing ---------------------------------------------------------------------------

    def finish(self, id: CheckpointId) -> bool:
        """Publish a checkpoint whose engines died just before that; whether it is published.

        Raises:
            TierError: it could not be done, or its shards do not belong together.
        """
        if self._final(id).is_dir():
            # A partial one beside it holds nothing that it has not.
            self._guarded("clear up", lambda: self._discard(self._partial(id)))
            return True
        writer = f"{socket.gethostname()}-{os.getpid()}"
        return self._guarded(f"finish checkpoint {id} in", lambda: self._finish(id, writer))

    def finish_all(self) -> list[CheckpointId]:
        """Publish every complete checkpoint that was left unpublished; which ones."""
        done = []
        for path in entries_in(self.folder):
            id = CheckpointId.parse(path.name.removesuffix(PARTIAL))
            if path.suffix != PARTIAL or id is None:
                continue
            try:
                if self.finish(id):
                    done.append(id)
            except TierError as error:
                log.warning("checkpoint %s stays unfinished: %s", id, error)
        self._guarded("clear up", self._sweep)
        return done

    def _finish(self, id: CheckpointId, writer: str, known: ShardRecord | None = None) -> bool:
        partial, final = self._partial(id), self._final(id)
        try:
            manifest = self._manifest(partial, known)
            if manifest is not None and manifest.id != id:
                raise CheckpointError(f"it was renamed: its records are of {manifest.id}")
            if manifest is not None:
                self._files.write_whole(partial / MANIFEST, manifest.encode(), writer=writer)
                self._files.publish(partial, final)
            elif not final.is_dir():
                return False
        except FileNotFoundError:
            if not final.is_dir():
                raise  # else somebody was faster
        # Drafts of those who were slower, or died, went along; nobody can use them any more.
        for draft in final.glob(".*.draft-*"):
            self._files.remove(draft)
        self._files.sync_folder(self.folder)
        return True

    def _manifest(self, home: Path, known: ShardRecord | None) -> Manifest | None:
        """The manifest, if the record of every rank is there; ``known`` is one of them."""
        ranks = ranks_in(home)
        if not ranks:
            return None
        if known is None:
            path = home / record_name(ranks[0])
            known = ShardRecord.decode(read_regular(path), str(path))
        if len(ranks) < known.world:
            return None
        return join({r: read_regular(home / record_name(r)) for r in ranks}, known, str(home))

    # -- reading -----------------------------------------------------------------------------

    def shards(self) -> Sequence[Stored]:
        """Every shard whose record is there, also of checkpoints that are not complete."""
        names = (path.name.removesuffix(PARTIAL) for path in entries_in(self.folder))
        ids = {id for name in names if (id := CheckpointId.parse(name)) is not None}
        # In this order: what is renamed in between is still seen.
        homes = [(id, home) for id in ids for home in (self._partial(id), self._final(id))]
        return sorted({Stored(id, rank) for id, home in homes for rank in ranks_in(home)})

    def open(self, stored: Stored) -> AssembledShard:
        """Open a rank's part of a checkpoint."""
        final, partial = self._final(stored.id), self._partial(stored.id)
        why = ""
        for home in (final, partial, final):
            try:
                return AssembledShard(home, stored.rank)
            except FileNotFoundError as error:
                why = why or f"{error.filename} is not there"
        raise CheckpointError(f"shard {stored.rank} of {stored.id} cannot be read: {why}")

    def record(self, stored: Stored) -> ShardRecord:
        """A rank's record, whatever has become of the files.

        Raises:
            CheckpointError: it is not there, or damaged.
        """
        what = f"the record of rank {stored.rank} in {self._final(stored.id)}"
        try:
            _, content = self._read(stored.id, record_name(stored.rank))
        except OSError as error:
            raise CheckpointError(f"cannot read {what}: {error.strerror or error}") from error
        return ShardRecord.decode(content or b"", what)

    def check(self, id: CheckpointId) -> Manifest:
        """See that a published checkpoint is what its manifest says, but for the tensors' bytes.

        Raises:
            CheckpointError: a file is missing, or a header, record or the manifest is damaged.
        """
        return check_published(self._final(id))

    def manifest_problem(self, id: CheckpointId) -> str | None:
        """What is wrong with the manifest of a published checkpoint; None if nothing is."""
        home = self._final(id)
        try:
            if home.is_dir():
                check_manifest(home)
        except CheckpointError as error:
            return str(error)
        return None

    def write_manifest(self, id: CheckpointId) -> None:
        """Make the manifest of a published checkpoint anew; it follows from the records.

        Raises:
            TierError: records are missing or damaged, or do not belong together.
        """
        home = self._final(id)

        def work() -> None:
            manifest = self._manifest(home, None)
            if manifest is None:
                raise TierError(f"{home} lacks records of some ranks")
            self._files.write_whole(home / MANIFEST, manifest.encode())

        self._guarded(f"write the manifest of {id} in", work)

    # -- removing ----------------------------------------------------------------------------

    def drop(self, id: CheckpointId) -> None:
        """Take the checkpoint's name away first: a crash on the way leaves none that seems whole.

        What crashes have left of older checkpoints goes as well. Engines of several nodes may drop
        it at once.
        """

        def work() -> None:
            self._sweep()
            for rest in older_rests(self.folder, id, PARTIAL):
                try:
                    self._discard(rest)
                except OSError as error:
                    log.warning("%s is left over, and cannot be removed: %s", rest, error)
            self._discard(self._partial(id))
            self._discard(self._final(id))

        self._guarded(f"remove checkpoint {id} from", work)

    def abandon(self, id: CheckpointId) -> None:
        """Remove the folder of a checkpoint that was not published, and never will be."""
        self._guarded(f"clear up after {id} in", lambda: self._discard(self._partial(id)))

    def clear(self, stale: Stale) -> list[CheckpointId]:
        """Remove folders that were never published; see ``tiers.leftovers``.

        One that has the records of all ranks is published instead.
        """
        return self._guarded("clear up", lambda: self._clear(stale))

    def _clear(self, stale: Stale) -> list[CheckpointId]:
        self._sweep()
        entries, cleared = entries_in(self.folder), []
        now = clock_of(self.folder, entries)
        for home in entries:
            id = CheckpointId.parse(home.name.removesuffix(PARTIAL))
            if home.suffix != PARTIAL or id is None or not stale.covers(id):
                continue
            if stale.is_quiet(home, now) and not self._finished(id):
                self._discard(home)
                cleared.append(id)
        return cleared

    def _finished(self, id: CheckpointId) -> bool:
        try:
            return self.finish(id)
        except TierError as error:  # its shards do not belong together, or are damaged
            log.warning("checkpoint %s is given up: %s", id, error)
            return False

    def _discard(self, home: Path) -> None:
        if not home.is_dir():
            return
        grave = self.folder / (home.name.removesuffix(PARTIAL) + DROPPED)
        with suppress(FileNotFoundError):  # somebody else does it
            self._files.publish(home, grave)
        self._files.sync_folder(self.folder)
        self._files.remove_tree(grave)

    def _sweep(self) -> None:
        """Remove what a crash has left of checkpoints being removed."""
        for path in entries_in(self.folder):
            if path.suffix == DROPPED and CheckpointId.parse(path.stem) is not None:
                remove_rest(self._files, path)

    def close(self) -> None:
        """Nothing runs."""

    # -- names -------------------------------------------------------------------------------

    def _final(self, id: CheckpointId) -> Path:
        return self.folder / id.folder

    def _partial(self, id: CheckpointId) -> Path:
        return self.folder / (id.folder + PARTIAL)

    def _guarded(self, what: str, work: Callable[[], T]) -> T:
        try:
            return work()
        except TierError:
            raise
        except OSError as error:
            raise tier_error(f"cannot {what} {self.folder}", error) from error
        except CheckpointError as error:
            raise TierError(f"cannot {what} {self.folder}: {error}") from error
