"""The contract of a provider: one server of a repository that several of them keep.

A version has one *head* (its record, manifest and layers) at the providers that its name is placed
at, and *parts* (the bytes of its tensors) at the providers that their contents are placed at. Equal
tensors have equal keys, and so meet at one provider, which keeps them once.

A save writes the parts first and the heads last: a version is there when a head is. A removal takes
the heads first. Whoever dies in between leaves parts without a head, which ``gc`` drops once they
are old and every provider that could have the head has answered that it has none. So references
across providers are never counted, and no transaction spans two of them.

A part carries the name of its model, and a tensor is asked for as part of a version: each provider
can tell by itself whether a token may read it, and to know a key grants nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from sapwood.errors import StoreError
from sapwood.repository.base import Kin, ModelRecord, NewModel
from sapwood.repository.manifest import Manifest
from sapwood.repository.names import Reference
from sapwood.storage import Durability

if TYPE_CHECKING:
    from sapwood.repository.sweeping import Swept
    from sapwood.repository.verifying import Verified

__all__ = [
    "Head",
    "Member",
    "Members",
    "NewPart",
    "Part",
    "PartRange",
    "Provider",
    "StaleMembers",
    "VersionKey",
]


@dataclass(frozen=True, slots=True, order=True)
class VersionKey:
    """Which version something belongs to; the number is unique over all providers."""

    name: str
    version: str
    id: int


@dataclass(frozen=True, slots=True, order=True)
class Member:
    """One provider of a repository, as all others and every client know it."""

    name: str
    """What placement goes by; it stays when the address changes."""
    address: str
    """``host:port``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Members:
    """Who keeps a repository, and how. A later list has a larger epoch and replaces this one."""

    epoch: int
    members: tuple[Member, ...]
    replicas: int = 1
    """At how many providers each head and each tensor is."""
    placement: str = "content"
    """``content``: each tensor by its bytes; ``model``: whole models by name, as in the paper."""
    before: tuple[Member, ...] = ()
    """While data moves to where this list places it: the members of the list before. What is not
    at its new place yet is there."""


class StaleMembers(StoreError):
    """The caller goes by an older list of members than the provider."""

    def __init__(self, message: str, members: Members) -> None:
        """``members`` is the provider's list; adopt it, and try again."""
        super().__init__(message)
        self.members = members


@dataclass(frozen=True, kw_only=True)
class Head:
    """A version as its home keeps it: everything but bytes."""

    model: NewModel
    """Its number and version are set; all its blobs are ``NOTHING``."""
    keys: tuple[bytes, ...]
    """Each tensor's key, b"" for one without elements; see ``placement.key_of``."""


@dataclass(frozen=True, kw_only=True)
class NewPart:
    """The tensors of one version that are placed at one provider."""

    version: VersionKey
    keys: tuple[bytes, ...]
    """One for each source, without repetition."""
    same_as: Mapping[int, tuple[VersionKey, bytes]]
    """For sources that are not sent: a version that the sender may read, whose tensor of the same
    key is equal, with the strong digest (``merging.digest_of``) of the sender's bytes as proof."""


@dataclass(frozen=True, slots=True)
class Part:
    """What a provider has of a version."""

    version: VersionKey
    keys: tuple[bytes, ...]
    nbytes: int
    created: float


@dataclass(frozen=True, slots=True)
class PartRange:
    """Some bytes of a tensor, and the memory they are to fill."""

    key: bytes
    start: int
    out: memoryview


class Provider(Protocol):
    """One provider, in this process or through a connection. Calls may come from several threads.

    Every call raises ``Unreachable`` if nobody answers, ``Denied`` if the token has no right to
    it, ``StaleMembers`` if the client goes by an older list of members, ``StoreError`` or
    ``StorageError`` if it cannot be done.
    """

    @property
    def address(self) -> str:
        """Where it is, for messages."""
        ...

    # -- who is there ------------------------------------------------------------------------

    def members(self) -> Members:
        """The list it goes by."""
        ...

    def take_members(self, members: Members) -> None:
        """Go by a newer list from now on; an older one is passed over."""
        ...

    # -- bytes -------------------------------------------------------------------------------

    def put_part(
        self, part: NewPart, sources: Sequence[memoryview | None], durability: Durability
    ) -> list[int]:
        """Keep a part; which of ``same_as`` could not be taken over and must be sent after all.

        If any is returned, nothing was kept. Sources of ``same_as`` are None. A part of the same
        version adds to the one there: a save that is tried again, or tensors that moved here.
        """
        ...

    def read_part(self, version: VersionKey, ranges: Sequence[PartRange]) -> list[int]:
        """Fill buffers; the indices of ranges whose tensors are not here, and were not filled."""
        ...

    def map_part(
        self, version: VersionKey, keys: Sequence[bytes]
    ) -> Mapping[bytes, memoryview] | None:
        """Tensors where they lie, private to the caller when written to; those that are here.

        None where this cannot be done: on another machine, or without the right to read
        everything that lies in the same memory.
        """
        ...

    def drop_part(self, version: VersionKey, keys: Sequence[bytes] | None = None) -> None:
        """Forget what is here of a version, or some of it; no error if there is nothing."""
        ...

    def parts(self, after: int = 0, limit: int = 1000) -> Sequence[Part]:
        """What is here, by number of version, in pages: those above ``after``."""
        ...

    # -- heads -------------------------------------------------------------------------------

    def reserve(self, name: str, version: str | None) -> VersionKey:
        """The number, and if there is none the version, of a version to be.

        Raises:
            ModelExists: it is there, or somebody else is saving it.
        """
        ...

    def put_head(self, head: Head, *, synced: bool) -> ModelRecord:
        """Make a version be there.

        Raises:
            ModelExists: it is there, with another number.
        """
        ...

    def head(self, reference: Reference) -> tuple[ModelRecord, Manifest, tuple[bytes, ...]]:
        """A version, its manifest and its tensors' keys; as ``Backend.manifest``."""
        ...

    def has_head(self, version: VersionKey) -> bool:
        """Whether a version is there; removed ones are not."""
        ...

    def remove_head(self, version: VersionKey) -> None:
        """Remove a version; its record stays in the lineage of others."""
        ...

    def copy_head(self, version: VersionKey) -> Head:
        """A head as it was put, with its tags, layers and configurations, for another provider.

        Raises:
            ModelNotFound: it is not here.
        """
        ...

    def drop_head(self, version: VersionKey) -> None:
        """Forget a head that belongs elsewhere now, with its record; no error if it is not here."""
        ...

    def find(self, reference: Reference) -> ModelRecord:
        """As ``Backend.find``, of the heads here."""
        ...

    def models(self, pattern: str) -> Sequence[ModelRecord]:
        """As ``Backend.models``, of the heads here that the token may read."""
        ...

    def by_id(self, id: int, name: str) -> ModelRecord:
        """As ``Backend.by_id``."""
        ...

    def children(self, id: int) -> Sequence[ModelRecord]:
        """As ``Backend.children``, of the heads here."""
        ...

    def kin(
        self, layers: Sequence[bytes], pattern: str, limit: int, by: str | None, lower: bool
    ) -> Sequence[Kin]:
        """As ``Backend.kin``, of the heads here."""
        ...

    def configs(self, digests: Sequence[bytes]) -> list[bytes | None]:
        """Configurations of layers; None for those that are not here."""
        ...

    def tag(self, reference: Reference, tag: str) -> ModelRecord:
        """As ``Backend.tag``."""
        ...

    def untag(self, name: str, tag: str) -> None:
        """As ``Backend.untag``."""
        ...

    # -- care --------------------------------------------------------------------------------

    def gc(self, *, quiet: float, said: Callable[[str], None]) -> Swept:
        """Of what is here, without looking at other providers."""
        ...

    def verify(self, *, said: Callable[[str], None]) -> Verified:
        """Of what is here, without looking at other providers."""
        ...

    def flush(self) -> None:
        """Return when what is done in the background is done."""
        ...

    def close(self) -> None:
        """Give back what is in use. Calling it again does nothing."""
        ...
