"""A repository on several providers, as its client has it.

Heads are at the homes of a model's name, tensors where their contents place them: nobody is asked
where something is. ``cluster_saving``, ``cluster_reading``, ``cluster_asking`` and ``cluster_care``
do the work; ``cluster_links`` has the connections and corrects the list of members.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from sapwood.repository.base import BlobPart, Kin, ModelRecord, NewModel
from sapwood.repository.manifest import Manifest
from sapwood.repository.names import Reference
from sapwood.repository.providers.base import Members, Provider
from sapwood.repository.providers.cluster_asking import Asking
from sapwood.repository.providers.cluster_care import gc, verify
from sapwood.repository.providers.cluster_handles import with_handles
from sapwood.repository.providers.cluster_links import Connect, Links, all_of
from sapwood.repository.providers.cluster_membership import Membership
from sapwood.repository.providers.cluster_places import version_of
from sapwood.repository.providers.cluster_reading import mapped, read
from sapwood.repository.providers.cluster_saving import save
from sapwood.repository.sweeping import Swept
from sapwood.repository.verifying import Verified
from sapwood.storage import Durability

__all__ = ["ClusterBackend"]


class ClusterBackend:
    """Fulfils ``Backend`` and ``Mappable`` over several providers.

    Owns its connections and threads; ``close`` ends them.
    """

    def __init__(self, name: str, members: Members, connect: Connect) -> None:
        """``connect`` makes the client of one provider, which is this object's to close."""
        self.name = name
        self.links = Links(members, connect)
        self._asking = Asking(self.links)

    @property
    def members(self) -> Members:
        """The list of providers that it goes by now."""
        return self.links.members

    @property
    def membership(self) -> Membership:
        """Changes of that list."""
        return Membership(self.links)

    # -- saving and reading ------------------------------------------------------------------

    def save(
        self,
        model: NewModel,
        sources: Sequence[memoryview],
        alike: Mapping[int, int],
        durability: Durability,
    ) -> ModelRecord:
        """Tensors first, each at its places, then the head at its homes."""
        return save(self.links, model, sources, alike, durability)

    def read(self, parts: Sequence[BlobPart]) -> None:
        """One request to each provider that has some of it."""
        read(self.links, parts)

    def mapped(self, blobs: Sequence[int]) -> Mapping[int, memoryview] | None:
        """Where providers are on this machine; the rest is read."""
        return mapped(self.links, blobs)

    # -- names -------------------------------------------------------------------------------

    def find(self, reference: Reference) -> ModelRecord:
        """As its homes have it."""
        return self._asking.find(reference)

    def manifest(self, reference: Reference) -> tuple[ModelRecord, Manifest]:
        """As its homes have it; the blobs are handles, see ``cluster_handles``."""
        record, manifest, keys = self._asking.head(
            reference, lambda provider: provider.head(reference), lambda found: found[0]
        )
        return record, with_handles(version_of(record), manifest, keys)

    def models(self, pattern: str = "*") -> Sequence[ModelRecord]:
        """Of all providers."""
        return self._asking.models(pattern)

    def by_id(self, id: int, name: str) -> ModelRecord:
        """As its homes have it."""
        return self._asking.by_id(id, name)

    def children(self, id: int) -> Sequence[ModelRecord]:
        """Of all providers."""
        return self._asking.children(id)

    def kin(
        self, layers: Sequence[bytes], pattern: str, limit: int, by: str | None, lower: bool
    ) -> Sequence[Kin]:
        """All providers are asked at once."""
        return self._asking.kin(layers, pattern, limit, by, lower)

    def configs(self, digests: Sequence[bytes]) -> list[bytes]:
        """From memory, or all providers."""
        return self._asking.configs(digests)

    def tag(self, reference: Reference, tag: str) -> ModelRecord:
        """At all homes, which must answer."""
        exact = self.find(reference).reference
        return self._asking.change(exact.name, "a tag", lambda provider: provider.tag(exact, tag))

    def untag(self, name: str, tag: str) -> None:
        """At all homes, which must answer."""
        self._asking.change(name, "a tag", lambda provider: provider.untag(name, tag))

    def remove(self, reference: Reference) -> ModelRecord:
        """The head at all homes, which must answer, then the tensors; what is left is ``gc``'s."""
        record = self.find(reference)
        version = version_of(record)
        self._asking.change(
            version.name, "a removal", lambda provider: provider.remove_head(version)
        )
        drop: Callable[[Provider], None] = lambda provider: provider.drop_part(version)  # noqa: E731
        self.links.quietly(dict.fromkeys(all_of(self.members), drop))
        return record

    # -- care --------------------------------------------------------------------------------

    def gc(self, *, quiet: float, said: Callable[[str], None]) -> Swept:
        """At all providers."""
        return self.links.current(partial(gc, self.links, quiet=quiet, said=said))

    def verify(self, *, said: Callable[[str], None]) -> Verified:
        """At all providers, and whether they have what they should."""
        return self.links.current(partial(verify, self.links, said=said))

    # -- the end -----------------------------------------------------------------------------

    def flush(self) -> None:
        """At all providers that answer."""
        self.links.everyone(lambda provider: provider.flush(), None)

    def close(self) -> None:
        """End connections and threads."""
        self.links.close()
