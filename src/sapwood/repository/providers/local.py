"""A provider in this process: heads in one catalog, tensors in a back end beside it."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from sapwood.buffers import HandoverPool
from sapwood.errors import ConfigError, StoreError
from sapwood.repository.base import Kin, ModelRecord
from sapwood.repository.database import Database, one
from sapwood.repository.folder import CATALOG, open_folder
from sapwood.repository.local import LocalBackend
from sapwood.repository.manifest import Manifest
from sapwood.repository.names import Reference, check_name, check_version
from sapwood.repository.packs import pieces
from sapwood.repository.providers.base import (
    Head,
    Member,
    Members,
    NewPart,
    Part,
    PartRange,
    VersionKey,
)
from sapwood.repository.providers.heads import HeadStore
from sapwood.repository.providers.parts import PartPlan, PartStore, size_of
from sapwood.repository.sweeping import Swept
from sapwood.repository.verifying import Verified
from sapwood.storage import Durability
from sapwood.storage.folder import FolderKeeper
from sapwood.storage.memory import MemoryKeeper

__all__ = ["LocalProvider", "members_of_json", "members_to_json", "open_provider"]

_LOCK = "provider.lock"


def open_provider(
    place: str | os.PathLike[str],
    *,
    name: str = "p0",
    address: str | None = None,
    members: Members | None = None,
    memory: int | None = None,
    staging: str = "preallocated",
) -> LocalProvider:
    """A provider over a folder, which is made if it is not there, or over ``memory:``.

    Args:
        place: the folder, which one process at a time may use, or ``memory:``.
        name: what placement knows it by.
        address: where others reach it, for messages and the first list of members.
        members: the list to go by if the place has none with a later epoch.
        memory: bytes that ``memory:`` may take at most.
        staging: ``preallocated``: memory for the next save is there before it comes;
            ``on_demand`` leaves that out.

    Raises:
        ConfigError: there is something else, or another process uses it.
        StoreError: it cannot be opened.
    """
    address = address or f"{os.fspath(place)} in this process"
    if place == "memory:":
        keeper = MemoryKeeper(limit=memory, pool=HandoverPool(policy=staging, label=name))
        heads = LocalBackend(f"{name} heads", Database(None), MemoryKeeper())
        parts = LocalBackend(f"{name} at {address}", Database(None), keeper)
        return LocalProvider(name, address, heads, parts, members=members)
    if memory is not None:
        raise ConfigError(f"a limit of memory goes with the place memory:, not with {place}")
    return _in_folder(Path(place), name, address, members)


def _in_folder(folder: Path, name: str, address: str, members: Members | None) -> LocalProvider:
    _check(folder)
    lock = _lock(folder)
    opened: list[LocalBackend] = []
    try:
        for inside in ("heads", "parts"):
            keeper = FolderKeeper(folder / inside)
            opened.append(open_folder(keeper, f"{name} at {address}", create=True))
        return LocalProvider(name, address, *opened, members=members, lock=lock)
    except BaseException:
        for backend in opened:
            backend.close()
        os.close(lock)
        raise


def _check(folder: Path) -> None:
    if not folder.is_dir() or (folder / _LOCK).is_file():
        return
    if (folder / CATALOG).is_file():
        raise ConfigError(
            f"{folder} is an embedded repository, which has no server; name another folder, and "
            "copy its models with put and get"
        )
    if any(folder.iterdir()):
        raise ConfigError(
            f"{folder} holds something else; name a folder that is empty or not there"
        )


def _lock(folder: Path) -> int:
    """The open lock of a folder: catalogs are cached, so that two processes must not use it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        fd = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise StoreError(f"cannot use {folder}: {error.strerror}") from error
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(fd)
        raise ConfigError(
            f"{folder} is in use by another provider; stop it, or name another folder"
        ) from None
    return fd


class LocalProvider:
    """Fulfils ``Provider``, with every right. Made by ``open_provider``; close it.

    Owns its two back ends, and the lock of its folder.
    """

    def __init__(
        self,
        name: str,
        address: str,
        heads: LocalBackend,
        parts: LocalBackend,
        *,
        members: Members | None = None,
        lock: int | None = None,
    ) -> None:
        """The back ends and the lock are this object's to close."""
        self.name = name
        self._address = address
        self._backend, self._lock = heads, lock
        self.heads = HeadStore(heads.catalog, heads.database)
        self.parts_here = PartStore(parts)
        self._members = self._kept_members()
        if members is not None:
            self.take_members(members)

    @property
    def address(self) -> str:
        """Where it is, for messages."""
        return self._address

    @property
    def durability(self) -> Durability:
        """The most it can promise by itself."""
        return self.parts_here.backend.keeper.durability

    # -- who is there ------------------------------------------------------------------------

    def members(self) -> Members:
        """The list it goes by; of epoch 0 and itself alone before it was given one."""
        return self._members or Members(epoch=0, members=(Member(self.name, self._address),))

    def take_members(self, members: Members) -> None:
        """Go by a newer list from now on, also when it is opened again."""
        with self._backend.database.writing(synced=True) as db:
            if members.epoch <= self.members().epoch:
                return
            text = members_to_json(members)
            db.execute("INSERT OR REPLACE INTO setting VALUES ('members', ?)", (text,))
            self._members = members

    def _kept_members(self) -> Members | None:
        with self._backend.database.reading() as db:
            row = one(db, "SELECT value FROM setting WHERE key = 'members'")
        return None if row is None else members_of_json(row[0])

    # -- bytes -------------------------------------------------------------------------------

    def put_part(
        self, part: NewPart, sources: Sequence[memoryview | None], durability: Durability
    ) -> list[int]:
        """Write what is not here yet as one pack, then make it be here."""
        plan = self.plan_part(part, durability)
        for index in plan.wanted:
            source = sources[index]
            if source is None or source.nbytes != size_of(part.keys[index]):
                raise StoreError(
                    f"{part.version.name}@{part.version.version}: source {index} is not of the "
                    "size that its key says"
                )
        promised = self.level(durability)

        def write(plan: PartPlan) -> None:
            found = [source for i in plan.wanted if (source := sources[i]) is not None]
            keeper = self.parts_here.backend.keeper
            with keeper.begin(plan.key, plan.nbytes, durability=promised) as draft:
                draft.write_parts(pieces(plan.starts, [memoryview(s).cast("B") for s in found]))
                draft.publish()

        return self.parts_here.put(plan, write, promised)

    def plan_part(self, part: NewPart, durability: Durability) -> PartPlan:
        """What must be sent of a part; see ``PartStore.put``.

        Raises:
            StoreError: it is not well formed, or more durable than this place is.
        """
        check_version_key(part.version)
        self.level(durability)
        return self.parts_here.plan(part)

    def level(self, durability: Durability) -> Durability:
        """What one provider does for a promise: ``replicated`` is as durable as it can, k times.

        Raises:
            ConfigError: more is asked for than there is.
        """
        most = min(self.durability, Durability.SYNCED)
        if durability is Durability.REPLICATED:
            return most
        if durability > most:
            raise ConfigError(
                f"provider {self.name} at {self.address} can promise {most.name.lower()!r} at "
                f"most, not {durability.name.lower()!r}"
            )
        return durability

    def read_part(self, version: VersionKey, ranges: Sequence[PartRange]) -> list[int]:
        """Fill buffers, with as few requests as possible."""
        return self.parts_here.read(version, ranges)

    def map_part(
        self, version: VersionKey, keys: Sequence[bytes]
    ) -> Mapping[bytes, memoryview] | None:
        """Where they lie; None on a network file system."""
        return self.parts_here.mapped(version, keys)

    def drop_part(self, version: VersionKey, keys: Sequence[bytes] | None = None) -> None:
        """In the catalog; packs stay until ``gc``."""
        self.parts_here.drop(version, keys)

    def parts(self, after: int = 0, limit: int = 1000) -> Sequence[Part]:
        """What is here, in pages."""
        return self.parts_here.parts(after, limit)

    # -- heads -------------------------------------------------------------------------------

    def reserve(self, name: str, version: str | None) -> VersionKey:
        """For ten minutes, or until ``put_head``, or until ``remove_head`` gives it up."""
        return self.reserve_for(name, version, None)

    def reserve_for(self, name: str, version: str | None, holder: object) -> VersionKey:
        """The same, for a holder who may be gone before."""
        check_name(name)
        if version is not None:
            check_version(version)
        return self.heads.reserve(name, version, holder)

    def put_head(self, head: Head, *, synced: bool) -> ModelRecord:
        """Make a version be there; the same once more does nothing."""
        model = head.model
        check_version_key(VersionKey(model.name, model.version or "", model.id or 0))
        for tag in model.tags:
            check_version(tag)
        return self.heads.put(head, synced=synced)

    def head(self, reference: Reference) -> tuple[ModelRecord, Manifest, tuple[bytes, ...]]:
        """A version, its manifest and its tensors' keys."""
        return self.heads.get(reference)

    def has_head(self, version: VersionKey) -> bool:
        """Whether a version is there, under this number."""
        return self.heads.has(version)

    def remove_head(self, version: VersionKey) -> None:
        """Remove a version, or give up that it was reserved; again does nothing."""
        self.heads.remove(version)

    def copy_head(self, version: VersionKey) -> Head:
        """As it was put, with its tags, for another provider."""
        return self.heads.copy(version)

    def drop_head(self, version: VersionKey) -> None:
        """Forget a head that belongs elsewhere now; no error if it is not here."""
        self.heads.drop(version)

    def find(self, reference: Reference) -> ModelRecord:
        """As the catalog has it."""
        return self.heads.catalog.find(reference)

    def models(self, pattern: str) -> Sequence[ModelRecord]:
        """As the catalog has them."""
        return self.heads.catalog.models(pattern)

    def by_id(self, id: int, name: str) -> ModelRecord:
        """As the catalog has it."""
        return self.heads.catalog.by_id(id, name)

    def children(self, id: int) -> Sequence[ModelRecord]:
        """As the catalog has them."""
        return self.heads.catalog.children(id)

    def kin(
        self, layers: Sequence[bytes], pattern: str, limit: int, by: str | None, lower: bool
    ) -> Sequence[Kin]:
        """From the catalog's index of layers."""
        return self.heads.catalog.kin(layers, pattern, limit, by, lower)

    def configs(self, digests: Sequence[bytes]) -> list[bytes | None]:
        """From the catalog."""
        text = json.dumps([digest.hex() for digest in digests])
        query = (
            "SELECT lower(hex(digest)), data FROM config WHERE lower(hex(digest)) IN "
            "(SELECT value FROM json_each(?))"
        )
        with self._backend.database.reading() as db:
            found: dict[str, bytes] = dict(db.execute(query, (text,)).fetchall())
        return [found.get(digest.hex()) for digest in digests]

    def tag(self, reference: Reference, tag: str) -> ModelRecord:
        """In the catalog."""
        return self.heads.catalog.tag(reference, check_version(tag))

    def untag(self, name: str, tag: str) -> None:
        """In the catalog."""
        self.heads.catalog.untag(name, tag)

    # -- care --------------------------------------------------------------------------------

    def gc(self, *, quiet: float, said: Callable[[str], None]) -> Swept:
        """Merge what is equal, then remove what no part here needs."""
        self.parts_here.clean()
        swept = self.parts_here.backend.gc(quiet=quiet, said=said)
        self.parts_here.disown(max(quiet, 3600.0))
        return swept

    def verify(self, *, said: Callable[[str], None]) -> Verified:
        """Every byte, every count, every manifest; ``models`` counts heads."""
        found = self.parts_here.backend.verify(said=said)
        heads = self._backend.verify(said=said)
        found.models = heads.models
        found.problems += heads.problems + self.heads.problems()
        return found

    def flush(self) -> None:
        """Wait until what was put is hashed and merged."""
        self.parts_here.backend.flush()

    def close(self) -> None:
        """Close both back ends, and let others have the folder."""
        self._backend.close()
        self.parts_here.backend.close()
        lock, self._lock = self._lock, None
        if lock is not None:
            os.close(lock)


def check_version_key(version: VersionKey) -> None:
    """Refuse what is no version.

    Raises:
        BadName: its name or version is not well formed.
        StoreError: its number is none.
    """
    check_name(version.name)
    check_version(version.version)
    if not 0 < version.id < 2**63:
        raise StoreError(f"{version.id} is no number of a version; see reserve")


def members_to_json(members: Members) -> str:
    """As text, for the catalog and the wire."""
    return json.dumps(
        {
            "epoch": members.epoch,
            "members": [[one.name, one.address] for one in members.members],
            "replicas": members.replicas,
            "placement": members.placement,
            "before": [[one.name, one.address] for one in members.before],
        }
    )


def members_of_json(text: str) -> Members:
    """The reverse.

    Raises:
        StoreError: it is not such a text.
    """
    try:
        found = json.loads(text)
        return Members(
            epoch=int(found["epoch"]),
            members=_members_in(found["members"]),
            replicas=int(found["replicas"]),
            placement=str(found["placement"]),
            before=_members_in(found["before"]),
        )
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise StoreError(f"a list of members is not well formed: {error!r}") from error


def _members_in(listed: Any) -> tuple[Member, ...]:
    return tuple(Member(str(name), str(address)) for name, address in listed)
