"""The contract of a back end: where a repository's models are kept.

A back end keeps manifests and the runs of bytes (*blobs*) that they refer to. It decides where
bytes lie and which ones are equal; the repository on top of it knows models, modules and tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from sapwood.repository.manifest import Manifest
from sapwood.repository.names import Reference
from sapwood.storage import Durability

if TYPE_CHECKING:
    from sapwood.repository.sweeping import Swept
    from sapwood.repository.verifying import Verified

__all__ = [
    "NOTHING",
    "Backend",
    "BlobPart",
    "Kin",
    "Mappable",
    "Merging",
    "ModelRecord",
    "NewModel",
    "Reclaiming",
    "fresh",
]

NOTHING = -1
"""The blob of a tensor without elements."""


def fresh(index: int) -> int:
    """What stands in a new model's manifest for the blob of the ``index``-th source."""
    return -2 - index


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRecord:
    """One version of a model, as a list shows it."""

    id: int
    """Unique in the repository, and larger than those of all earlier versions of its model."""
    name: str
    version: str
    created: float
    removed: float | None
    parent: int | None
    parent_name: str | None
    """The parent's name without its version; where the parent is found."""
    nbytes: int
    tensors: int
    note: Mapping[str, Any]
    metrics: Mapping[str, float] = field(default_factory=dict)
    tags: tuple[str, ...] = ()

    @property
    def reference(self) -> Reference:
        """Its name with its version."""
        return Reference(self.name, self.version)


@dataclass(frozen=True, kw_only=True)
class NewModel:
    """A model version to be."""

    name: str
    version: str | None
    """None takes the next number."""
    manifest: Manifest
    """Its blobs are numbers of the back end's, ``NOTHING``, or ``fresh``."""
    parent: int | None = None
    parent_name: str | None = None
    """With ``parent``: the name of its model."""
    id: int | None = None
    """Its number, if it was given one already; see ``names.new_id``."""
    tags: Sequence[str] = ()
    metrics: Mapping[str, float] = field(default_factory=dict)
    note: Mapping[str, Any] = field(default_factory=dict)
    layers: Mapping[bytes, int] = field(default_factory=dict)
    """Bytes of each layer's tensors, by the layer's id."""
    configs: Mapping[bytes, bytes] = field(default_factory=dict)
    """Configurations of layers that its graph refers to, by digest."""

    def with_blobs(self, blobs: tuple[int, ...]) -> NewModel:
        """The same with other numbers for its blobs."""
        return replace(self, manifest=replace(self.manifest, blobs=blobs))


@dataclass(frozen=True, slots=True, kw_only=True)
class Kin:
    """A version that has layers in common with a model."""

    record: ModelRecord
    layers: int
    nbytes: int
    """Bytes of the layers in common."""


@dataclass(frozen=True, slots=True)
class BlobPart:
    """A part of a blob, and where its bytes shall go."""

    blob: int
    start: int
    out: memoryview


class Backend(Protocol):
    """Keeps models. Calls may come from several threads, and from processes that were forked.

    Every call raises ``StoreError`` if it cannot be done.
    """

    @property
    def name(self) -> str:
        """Where it is, as a user wrote it."""
        ...

    # -- models ------------------------------------------------------------------------------

    def save(
        self,
        model: NewModel,
        sources: Sequence[memoryview],
        alike: Mapping[int, int],
        durability: Durability,
    ) -> ModelRecord:
        """Keep a version with the bytes of its new blobs; whole, or nothing of it.

        Args:
            model: what its manifest calls ``fresh(i)`` is the ``i``-th of the sources.
            sources: bytes; they are the caller's again when this returns.
            alike: for some sources a blob that may hold the same bytes, and is used if it does.
            durability: what all of it survives when this returns.

        Raises:
            ModelExists: it is there.
        """
        ...

    def find(self, reference: Reference) -> ModelRecord:
        """A version; a tag stands for a version, and no version for the latest.

        Raises:
            ModelNotFound: there is none.
        """
        ...

    def manifest(self, reference: Reference) -> tuple[ModelRecord, Manifest]:
        """The same, with its tensors."""
        ...

    def models(self, pattern: str = "*") -> Sequence[ModelRecord]:
        """Every version of every model whose name fits, by name, oldest first.

        Names that begin with a dot (``names.HIDDEN``) are those of unfinished work: they fit only
        patterns that begin with a dot, too.
        """
        ...

    def by_id(self, id: int, name: str) -> ModelRecord:
        """A version of a model, also one that was removed.

        Raises:
            ModelNotFound: there never was.
        """
        ...

    def children(self, id: int) -> Sequence[ModelRecord]:
        """The versions whose parent it is."""
        ...

    def kin(
        self, layers: Sequence[bytes], pattern: str, limit: int, by: str | None, lower: bool
    ) -> Sequence[Kin]:
        """The versions with most bytes in layers of these ids; of equals, the best by a metric."""
        ...

    def configs(self, digests: Sequence[bytes]) -> list[bytes]:
        """Configurations of layers, in that order.

        Raises:
            Damaged: one is not there.
        """
        ...

    def tag(self, reference: Reference, tag: str) -> ModelRecord:
        """Make a tag point to a version."""
        ...

    def untag(self, name: str, tag: str) -> None:
        """Remove a tag."""
        ...

    def remove(self, reference: Reference) -> ModelRecord:
        """Remove a version; its bytes go when nobody needs them and ``gc`` is called."""
        ...

    # -- bytes -------------------------------------------------------------------------------

    def read(self, parts: Sequence[BlobPart]) -> None:
        """Fill buffers with parts of blobs.

        Raises:
            Gone: a blob was removed.
            Damaged: its bytes are not there.
        """
        ...

    def gc(self, *, quiet: float, said: Callable[[str], None]) -> Swept:
        """Remove what no version needs, beside readers and writers."""
        ...

    def verify(self, *, said: Callable[[str], None]) -> Verified:
        """Look whether everything that is promised is there and right."""
        ...

    def flush(self) -> None:
        """Return when what is done in the background, such as merging equal tensors, is done."""
        ...

    def close(self) -> None:
        """Give back what is in use. Calling it again does nothing."""
        ...


@runtime_checkable
class Mappable(Protocol):
    """A back end whose blobs can be used where they lie, without copying."""

    def mapped(self, blobs: Sequence[int]) -> Mapping[int, memoryview] | None:
        """Memory of blobs that may be written to, which never reaches the back end.

        None where this cannot be done, as on a network file system.
        """
        ...


@runtime_checkable
class Merging(Protocol):
    """A back end that keeps equal tensors once, and can say which blobs are equal."""

    def canonical(self, blobs: Sequence[int]) -> Mapping[int, int | None]:
        """For each blob the one that stands for all that are equal to it; it never changes again.

        None while nobody has compared its bytes with others yet. A blob that was removed is left
        out.
        """
        ...


@runtime_checkable
class Reclaiming(Protocol):
    """A back end that can give back room at once, without a look at everything it keeps."""

    def reclaim(self) -> int:
        """Give back the room of what was removed; how many bytes. May run beside all else."""
        ...
