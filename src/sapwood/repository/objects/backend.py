"""A repository on a keeper alone: no database and no server, so any number of machines may use it.

Models are logs of small objects, tensors are packs; see ``layout``. A version is there when the
event of its save is, which is one conditional put.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from sapwood.errors import (
    Damaged,
    Gone,
    ModelNotFound,
    NotFound,
    StoreError,
)
from sapwood.repository.base import NOTHING, BlobPart, Kin, ModelRecord, NewModel
from sapwood.repository.manifest import Manifest
from sapwood.repository.names import Reference, nearest
from sapwood.repository.objects.blobs import Blobs
from sapwood.repository.objects.head import Head, decode_layers
from sapwood.repository.objects.journal import Journal, side_by_side
from sapwood.repository.objects.layout import LARGEST
from sapwood.repository.objects.saving import forget, leased, plan, usable, write
from sapwood.repository.objects.sweeping import Sweep
from sapwood.repository.objects.verifying import verify
from sapwood.repository.objects.view import Event, View, save_event
from sapwood.repository.sweeping import Swept
from sapwood.repository.verifying import Verified
from sapwood.storage import Durability, Keeper

__all__ = ["ObjectBackend"]

_TRIES = 3


class ObjectBackend:
    """Fulfils ``Backend`` on any keeper. Owns the keeper, and what it remembers of the logs."""

    def __init__(
        self, name: str, keeper: Keeper, *, reopen: Callable[[], Keeper] | None = None
    ) -> None:
        """Nothing is asked before the first call.

        Args:
            name: the user's word for the place.
            keeper: of a place that is a repository; see ``objects.opening``.
            reopen: opens the place again in a forked process; None where that cannot be done.
        """
        self.name = name
        self.blobs = Blobs()
        self._reopen = reopen
        self._closed = False
        self._begin(keeper)

    def _begin(self, keeper: Keeper) -> None:
        self._keeper = keeper
        self._view = View()
        self._journal = Journal(keeper, self._view)
        self._pid = os.getpid()

    @property
    def keeper(self) -> Keeper:
        """Where the objects are.

        Raises:
            StoreError: the repository was closed, or this is a fork that cannot open it again.
        """
        if self._closed:
            raise StoreError("the repository was closed; open it again")
        if self._pid != os.getpid():
            if self._reopen is None:
                raise StoreError(
                    f"{self.name} was opened before this process was forked, and its connections "
                    "do not come along: open it in the new process, or start that by spawn"
                )
            # Threads and locks of the parent are not here, and what it remembers may be half done.
            self._begin(self._reopen())
        return self._keeper

    @property
    def view(self) -> View:
        """What is known of the logs."""
        _ = self.keeper
        return self._view

    @property
    def journal(self) -> Journal:
        """The logs."""
        _ = self.keeper
        return self._journal

    # -- saving ------------------------------------------------------------------------------

    def save(
        self,
        model: NewModel,
        sources: Sequence[memoryview],
        alike: Mapping[int, int],
        durability: Durability,
    ) -> ModelRecord:
        """Share what this process knows to be there, by digest; write the rest, then the event."""
        keeper = self.keeper
        todo = plan(model, sources, self.blobs)
        with leased(keeper, todo.packs):
            shared = usable(keeper, todo.packs) if todo.packs else set()
            for pack in set(todo.packs) - shared:
                self.blobs.take_moved(keeper, pack)
            made = write(keeper, todo, shared, durability)

            def propose() -> Event:
                id, version = self.view.to_save(model)
                return save_event(
                    model, id, version, head=made.head, layers=made.layers, pack=made.pack
                )

            try:
                event = self.journal.append(model.name, propose, durability)
            except StoreError:  # and no StorageError, after which it may be there all the same
                forget(keeper, made)
                raise
        record = self.view.by_id(event["id"], model.name)
        for row in made.rows:
            self.blobs.number(row, (record.id, str(record.reference)))
        self.view.add_configs(model.configs)
        return record

    # -- looking -----------------------------------------------------------------------------

    def find(self, reference: Reference) -> ModelRecord:
        """By the log of its model."""
        self.journal.sync(reference.name)
        self._refuse_unknown(reference.name)
        return self.view.find(reference)

    def _refuse_unknown(self, name: str) -> None:
        """Of names that are alike, also those that this process has not heard of are told."""
        if not self.view.has_name(name):
            known = set(self.journal.logs()) - {name}
            raise ModelNotFound(f"there is no model {name!r}{nearest(name, known)}")

    def manifest(self, reference: Reference) -> tuple[ModelRecord, Manifest]:
        """By the log of its model, and its head."""
        for attempt in range(_TRIES):
            record = self.find(reference)
            try:
                head = self.head(record.id)
            except NotFound as error:
                if attempt == _TRIES - 1 and self.view.is_live(record.id):
                    raise Damaged(f"{record.reference}: {error}; its head is missing") from error
            else:
                return record, self._numbered(record, head)
        raise Gone(f"{reference} was removed")

    def head(self, id: int) -> Head:
        """The head of a version that is known.

        Raises:
            NotFound: it is not there any more.
        """
        key = self.view.saved[id].head
        head = Head.decode(self.keeper.get(key, limit=LARGEST), key)
        self.view.add_configs(head.configs)
        return head

    def _numbered(self, record: ModelRecord, head: Head) -> Manifest:
        whole = head.manifest
        names = {number: name for name, number in reversed(whole.names)}
        blobs = []
        for number, at in enumerate(whole.blobs):
            user = (record.id, f"{record.reference} {names.get(number, number)}")
            blobs.append(at if at == NOTHING else self.blobs.number(head.rows[at], user))
        return replace(whole, blobs=tuple(blobs))

    def models(self, pattern: str = "*") -> Sequence[ModelRecord]:
        """By all logs."""
        self.journal.sync_all()
        return self.view.models(pattern)

    def by_id(self, id: int, name: str) -> ModelRecord:
        """By the log of its model."""
        self.journal.sync(name)
        return self.view.by_id(id, name)

    def children(self, id: int) -> Sequence[ModelRecord]:
        """By all logs."""
        self.journal.sync_all()
        return self.view.children(id)

    def kin(
        self, layers: Sequence[bytes], pattern: str, limit: int, by: str | None, lower: bool
    ) -> Sequence[Kin]:
        """By the layers of all versions, of which each is read once."""
        self.journal.sync_all()
        side_by_side(self._index, [id for id in self.view.live() if id not in self.view.indexed])
        return self.view.kin(layers, pattern, limit, by, lower)

    def _index(self, id: int) -> None:
        saved, layers = self.view.saved[id], dict[bytes, int]()
        if saved.layers is not None:
            try:
                layers = decode_layers(self.keeper.get(saved.layers, limit=LARGEST), saved.layers)
            except NotFound as error:
                self.journal.sync(saved.name)
                if self.view.is_live(id):
                    raise Damaged(f"{saved.name}@{saved.version}: {error}") from error
                return
        self.view.index(id, layers)

    def configs(self, digests: Sequence[bytes]) -> list[bytes]:
        """Of heads that were read."""
        return self.view.configs(digests)

    # -- names -------------------------------------------------------------------------------

    def tag(self, reference: Reference, tag: str) -> ModelRecord:
        """One event."""

        def propose() -> Event:
            self._refuse_unknown(reference.name)
            return self.view.to_tag(reference, tag)

        event = self.journal.append(reference.name, propose)
        return self.view.by_id(event["id"], reference.name)

    def untag(self, name: str, tag: str) -> None:
        """One event."""

        def propose() -> Event:
            if not self.view.has_tag(name, tag):
                raise ModelNotFound(f"{name} has no tag {tag!r}")
            return {"op": "untag", "tag": tag}

        self.journal.append(name, propose)

    def remove(self, reference: Reference) -> ModelRecord:
        """One event; its objects stay until ``gc``."""
        before: list[ModelRecord] = []

        def propose() -> Event:
            self._refuse_unknown(reference.name)
            before[:] = [self.view.find(reference)]
            return {"op": "remove", "id": before[0].id, "time": time.time()}

        self.journal.append(reference.name, propose)
        return before[0]

    # -- bytes -------------------------------------------------------------------------------

    def read(self, parts: Sequence[BlobPart]) -> None:
        """Fill buffers, with as few requests as possible; whole tensors are checked."""
        try:
            self.blobs.read(self.keeper, parts)
        except NotFound as error:
            raise self._lost(parts, error) from error

    def _lost(self, parts: Sequence[BlobPart], error: NotFound) -> StoreError | Damaged:
        """Were the bytes removed with their version, or are they missing?"""
        for blob in {part.blob for part in parts}:
            if self._there(blob):
                continue
            for id, user in self.blobs[blob].users:
                self.journal.sync(user.partition("@")[0])
                if self.view.is_live(id):
                    return Damaged(f"{user}: {error}; a pack is missing")
        return Gone(f"{error}: it was removed")

    def _there(self, blob: int) -> bool:
        for pack, _ in self.blobs[blob].spots:
            try:
                self.keeper.size(pack)
            except NotFound:
                continue
            return True
        return False

    # -- care --------------------------------------------------------------------------------

    def gc(self, *, quiet: float, said: Callable[[str], None]) -> Swept:
        """Beside readers and writers, on whatever machines."""
        return Sweep(self.keeper, self.journal, self.view, quiet=quiet, said=said).run()

    def verify(self, *, said: Callable[[str], None]) -> Verified:
        """Of every log, head and tensor."""
        return verify(self.keeper, self.journal, self.view, said=said)

    def flush(self) -> None:
        """Nothing is done in the background: gc merges equal tensors."""
        _ = self.keeper

    def close(self) -> None:
        """Give back what is in use."""
        if self._closed:
            return
        self._closed = True
        if self._pid == os.getpid():
            self._view.close()
            self._keeper.close()
