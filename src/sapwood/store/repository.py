"""The model repository: saving models by name, and giving back any tensor of any of them."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from sapwood.errors import ConfigError, Gone, GraphError, ModelExists, ModelNotFound, StoreError
from sapwood.repository.architecture import PackedGraph, layer_sizes, pack_graph
from sapwood.repository.base import (
    NOTHING,
    Backend,
    BlobPart,
    Mappable,
    Merging,
    ModelRecord,
    NewModel,
    fresh,
)
from sapwood.repository.manifest import Manifest
from sapwood.repository.names import Reference, check_version, parse
from sapwood.repository.sweeping import Swept
from sapwood.repository.verifying import Verified
from sapwood.state.graph import Graph
from sapwood.storage import Durability
from sapwood.storage.base import QUIET_SECONDS
from sapwood.store.ancestry import Ancestor, Ancestry, Transfer, pairs_by_name
from sapwood.store.comparing import Change, compare
from sapwood.store.finding import ordered, search
from sapwood.store.kept import alike_files, check_files
from sapwood.store.known import KnownStates
from sapwood.store.raw import bytes_of, dtype_name, empty, tensor_in
from sapwood.store.selection import select
from sapwood.store.stored import StoredModel
from sapwood.store.targets import check_fit, fill, named_tensors, names_of
from sapwood.store.tree import Parts, entries, other_entries, put_together, take_apart
from sapwood.tiers.versions import tidy

__all__ = ["Repository", "durability_of"]

log = logging.getLogger(__name__)
_TRIES = 3
"""How often something is looked up again that others removed or moved in the same moment."""


def _ignore(_: str) -> None:
    """Nobody wants to know."""


class Repository:
    """Models by ``name@version``. Made by ``sapwood.store.open``; close it, or use ``with``.

    Versions never change; a bare name means the latest one; tags move. May be used by several
    threads, and by processes that were forked.
    """

    def __init__(self, backend: Backend, *, durability: Durability = Durability.WRITTEN) -> None:
        """The back end is this object's to close; ``durability`` is what ``save`` promises."""
        self._backend = backend
        self._ancestry = Ancestry(backend)
        self._states = KnownStates()
        self.durability = durability

    # -- saving ------------------------------------------------------------------------------

    def save(
        self,
        value: nn.Module | Any,
        reference: str,
        *,
        parent: str | None = None,
        tags: Iterable[str] = (),
        metrics: Mapping[str, float] | None = None,
        note: Mapping[str, Any] | None = None,
        files: Mapping[str, bytes | memoryview] | None = None,
        sample: Any = None,
        durability: Durability | str | None = None,
    ) -> ModelRecord:
        """Save a module, a state dict, or nested tensors with plain values.

        Args:
            value: what to save; tied tensors stay tied.
            reference: ``name@version``, or a name, which takes the next number.
            parent: the version it comes from: tensors that are still the same take no room.
            tags: names that shall point to it; they move.
            metrics: numbers to find it by, such as ``{"val_acc": 0.93}``.
            note: anything else to remember, as JSON.
            files: small files to keep beside the tensors, such as ``config.json``, by name.
            sample: what the module's forward gets, a tensor or ``state.graph.Sample``: the graph
                of its layers is found with it, by which it is an ancestor of other models. Only
                shapes matter. Without one, a graph is kept where one is found all the same.
            durability: what it must survive, if not what the repository promises anyway.

        Raises:
            ModelExists: the version is there; versions never change.
            ModelNotFound: there is no such parent.
            StoreError: something in the value cannot be kept, or the place cannot be written.
        """
        target = parse(reference)
        promised = self.durability if durability is None else durability_of(durability)
        labels = tuple(dict.fromkeys(check_version(tag) for tag in tags))
        self._refuse_existing(target)
        known = isinstance(value, nn.Module)
        parts = self._states.take_apart(value) if known else take_apart(value)
        dtypes = tuple(map(dtype_name, parts.tensors))
        sources = [bytes_of(tensor) for tensor in parts.tensors]
        origin = self._backend.manifest(parse(parent)) if parent is not None else None
        alike = _alike(parts, dtypes, origin[1]) if origin is not None else {}
        kept = check_files(files or {})
        sources += kept.values()
        if origin is not None:
            alike |= alike_files(kept, origin[1], len(dtypes))
        manifest = Manifest(
            dtypes + ("uint8",) * len(kept),
            tuple(tuple(tensor.shape) for tensor in parts.tensors)
            + tuple((len(data),) for data in kept.values()),
            tuple(fresh(i) if len(data) else NOTHING for i, data in enumerate(sources)),
            parts.names,
            parts.structure,
            files=tuple((name, len(dtypes) + i) for i, name in enumerate(kept)),
            text=parts.text,
        )
        graph = self._graph(value, sample)
        packed = pack_graph(graph) if graph is not None else PackedGraph(b"", {})
        manifest = replace(manifest, graph=packed.data)
        named = {name: manifest.sizes[number] for name, number in manifest.names}
        model = NewModel(
            name=target.name,
            version=target.version,
            manifest=manifest,
            parent=origin[0].id if origin is not None else None,
            parent_name=origin[0].name if origin is not None else None,
            tags=labels,
            metrics=_metrics(metrics or {}),
            note=dict(note or {}),
            layers=layer_sizes(graph, named) if graph is not None else {},
            configs=packed.configs,
        )
        return self._backend.save(model, sources, alike, promised)

    def _graph(self, value: Any, sample: Any) -> Graph | None:
        """The architecture of a module, where there is one that says more than its names do."""
        if not isinstance(value, nn.Module):
            if sample is not None:
                raise ConfigError("sample= goes with a module, and this is a state dict")
            return None
        try:
            graph = self._ancestry.graphs.find(value, sample)
        except GraphError as error:
            if sample is not None:
                raise
            log.info("no architecture is kept: %s", error)
            return None
        return graph

    def _refuse_existing(self, target: Reference) -> None:
        """Before bytes are moved for nothing; the back end sees to it once more."""
        if target.version is None:
            return
        try:
            found = self._backend.find(target)
        except ModelNotFound:
            return
        if found.version == target.version:
            raise ModelExists(
                f"{target} is there already, and a version never changes: save under another "
                "version, or remove this one"
            )

    # -- loading -----------------------------------------------------------------------------

    def load(
        self,
        reference: str,
        *,
        into: nn.Module | Mapping[str, Tensor] | None = None,
        layers: str | Iterable[str] | None = None,
        strict: bool | None = None,
        cast: bool = False,
    ) -> Any:
        """Load a version, or some of its tensors.

        Args:
            reference: ``name@version``, ``name@tag``, or a name for its latest version.
            into: a module or a mapping of tensors to copy into: everything that does not fit is
                listed at once, and then nothing is changed. Without it the value that was saved
                comes back; its tensors may be written to, which never reaches the repository.
            layers: names of tensors or modules, or patterns such as ``conv*``; only these are read.
            strict: whether ``into`` may have nothing beside; by default where all is loaded.
            cast: convert to the dtypes of ``into`` where they differ.

        Returns:
            The value; with ``layers`` a dictionary of tensors; with ``into`` the version's record.
        """
        for attempt in range(_TRIES):
            record, manifest = self._backend.manifest(parse(reference))
            try:
                return self._loaded(record, manifest, into, layers, strict, cast)
            except Gone:
                if attempt == _TRIES - 1:
                    raise
        raise AssertionError  # never: the loop returns or raises

    def _loaded(
        self,
        record: ModelRecord,
        manifest: Manifest,
        into: nn.Module | Mapping[str, Tensor] | None,
        layers: str | Iterable[str] | None,
        strict: bool | None,
        cast: bool,
    ) -> Any:
        what = str(record.reference)
        names = select(manifest, layers, what)
        if into is None:
            tensors = self._tensors(manifest, sorted({manifest.by_name[name] for name in names}))
            if layers is None:
                return put_together(manifest.structure, tensors.__getitem__)
            return {name: tensors[manifest.by_name[name]] for name in names}
        complete = layers is None if strict is None else strict
        others = other_entries(manifest) if layers is None else []
        inside = [n for n in names if any(n.startswith(f"{entry}.") for entry in others)]
        others_names = set(inside)
        direct = [name for name in names if name not in others_names]
        if strict is False and layers is None:
            here = names_of(into)
            direct = [name for name in direct if name in here]
        fit = check_fit(into, manifest, direct, what=what, strict=complete, cast=cast)
        wanted = {manifest.by_name[name] for name in (*direct, *inside)}
        tensors = self._tensors(manifest, sorted(wanted))
        values = {name: tensors[manifest.by_name[name]] for name in direct}
        fill(fit, values, entries(manifest, others, tensors) if others else {})
        return record

    def _tensors(self, manifest: Manifest, numbers: Sequence[int]) -> dict[int, Tensor]:
        rows = [manifest.row(number) for number in numbers]
        blobs = [row.blob for row in rows if row.blob != NOTHING]
        mapped = self._backend.mapped(blobs) if isinstance(self._backend, Mappable) else None
        if mapped is not None:
            return {
                row.number: tensor_in(mapped[row.blob], row) if row.blob != NOTHING else empty(row)
                for row in rows
            }
        found = {row.number: empty(row) for row in rows}
        self._backend.read(
            [
                BlobPart(row.blob, 0, bytes_of(found[row.number]))
                for row in rows
                if row.blob != NOTHING
            ]
        )
        return found

    def open(self, reference: str) -> StoredModel:
        """A version as a mapping of its tensors: ``repo.open("a@1")["conv.weight"][0:8]``."""
        record, manifest = self._backend.manifest(parse(reference))
        return StoredModel(self._backend, record, manifest)

    # -- names -------------------------------------------------------------------------------

    def info(self, reference: str) -> ModelRecord:
        """What is known of a version: size, parent, tags, metrics."""
        return self._backend.find(parse(reference))

    def models(self, pattern: str = "*") -> list[ModelRecord]:
        """Every version of the models whose name fits a pattern, by name, oldest first."""
        return list(self._backend.models(pattern))

    def find(
        self, expression: str, *, by: str | None = None, lower: bool = False
    ) -> list[ModelRecord]:
        """The versions that fit an expression such as ``val_acc > 0.9 and size < 1GB``.

        What it may say is in ``sapwood.store.finding``: metrics, name, version, tag, size,
        tensors, created and age, with ``and``, ``or``, ``not`` and parentheses.

        Args:
            expression: what they must fit.
            by: the best by this metric first; else by name, oldest first.
            lower: less is better in that metric.

        Raises:
            ConfigError: it cannot be read, or is about a metric that no version has.
        """
        found = search(self._backend.models(), expression)
        return found if by is None else ordered(found, by, lower=lower)

    def tag(self, reference: str, tag: str) -> ModelRecord:
        """Make a tag point to a version; it moves if it pointed to another one."""
        return self._backend.tag(parse(reference), check_version(tag))

    def untag(self, name: str, tag: str) -> None:
        """Remove a tag; the version stays."""
        self._backend.untag(parse(name).name, check_version(tag))

    def remove(self, reference: str) -> ModelRecord:
        """Remove a version. What other versions share with it stays; ``gc`` frees the rest."""
        return self._backend.remove(parse(reference))

    # -- equal tensors -----------------------------------------------------------------------

    def canonical(self, blobs: Sequence[int]) -> Mapping[int, int | None] | None:
        """Which of a manifest's blobs are equal: each with the one that stands for all equal ones.

        A blob whose bytes were not compared with others yet has None. None instead of a mapping
        where the place cannot say.
        """
        if not isinstance(self._backend, Merging):
            return None
        return self._backend.canonical(blobs)

    # -- ancestors ---------------------------------------------------------------------------

    def best_ancestor(
        self,
        model: nn.Module,
        sample: Any = None,
        *,
        by: str | None = None,
        lower: bool = False,
        pattern: str = "*",
    ) -> Ancestor | None:
        """The version that a model has most in common with: the longest prefix of equal layers.

        Layers are equal if they are of the same kind and shape, and all they follow from is:
        names do not matter. None if no version has any.

        Args:
            model: the new model.
            sample: what its forward gets, as in ``save``.
            by: of several with as much in common, the best by this metric, and else the newest.
            lower: less is better in that metric.
            pattern: of names of models to choose from.

        Raises:
            GraphError: the model has no graph; a sample mostly helps.
        """
        return self._ancestry.best(model, sample, by=by, lower=lower, pattern=pattern)

    def transfer(
        self,
        model: nn.Module,
        reference: str | None = None,
        sample: Any = None,
        *,
        by: str | None = None,
        lower: bool = False,
        pattern: str = "*",
    ) -> Transfer | None:
        """Copy into a model what it has in common with a version, by default its best ancestor.

        Tensors of another dtype are left as they are, and listed. None if nothing is in common.

        Raises:
            StoreError: the version that was named has no architecture.
        """
        if reference is None:
            found = self.best_ancestor(model, sample, by=by, lower=lower, pattern=pattern)
            if found is None:
                return None
        else:
            found = self._ancestry.compared(self._backend.find(parse(reference)), model, sample)
        same = [pair for pair in found.match.tensors if pair.same_dtype]
        names = pairs_by_name(same)
        if names:
            values = self.load(str(found.record.reference), layers=sorted(set(names.values())))
            here = named_tensors(model)
            with torch.no_grad():
                for new, old in names.items():
                    here[new].copy_(values[old])
        left = tuple(p.new.names[0] for p in found.match.tensors if not p.same_dtype)
        return Transfer(ancestor=found, copied=tuple(names), left=left)

    # -- lineage -----------------------------------------------------------------------------

    def log(self, reference: str) -> list[ModelRecord]:
        """A version and what it comes from, newest first; also versions that were removed."""
        found = [self._backend.find(parse(reference))]
        seen = {found[0].id}
        while (parent := found[-1].parent) is not None and parent not in seen:
            found.append(self._backend.by_id(parent, found[-1].parent_name or ""))
            seen.add(parent)
        return found

    def by_id(self, id: int, name: str) -> ModelRecord:
        """A version of a model by its number, also one that was removed.

        Raises:
            ModelNotFound: there never was.
        """
        return self._backend.by_id(id, name)

    def children_of(self, id: int) -> list[ModelRecord]:
        """The versions whose parent has this number, oldest first; also what was removed."""
        return list(self._backend.children(id))

    def children(self, reference: str) -> list[ModelRecord]:
        """The versions whose parent it is, oldest first."""
        return list(self._backend.children(self._backend.find(parse(reference)).id))

    def diff(self, before: str, after: str) -> list[Change]:
        """What differs between two versions, tensor by tensor, and by how much."""
        return compare(self.open(before), self.open(after))

    # -- care --------------------------------------------------------------------------------

    def gc(self, *, quiet: float = QUIET_SECONDS, said: Callable[[str], None] = _ignore) -> Swept:
        """Give back the room of what no version needs; may run while others read and save.

        Args:
            quiet: seconds after which an unfinished save of another machine is given up.
            said: called with what is done, for progress.
        """
        for id in tidy(self._backend, self.durability, quiet=quiet):
            said(f"removed the shards of checkpoint {id}, which was never whole")
        return self._backend.gc(quiet=quiet, said=said)

    def verify(self, *, said: Callable[[str], None] = _ignore) -> Verified:
        """Read every byte once and compare it with its digest; count every reference."""
        return self._backend.verify(said=said)

    # -- the end -----------------------------------------------------------------------------

    def flush(self) -> None:
        """Return when what is done in the background, such as merging equal tensors, is done."""
        self._backend.flush()

    def close(self) -> None:
        """Give back what is in use. Calling it again does nothing."""
        self._backend.close()

    def __enter__(self) -> Repository:
        """Close at the end of a ``with`` block."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close."""
        self.close()


def _alike(parts: Parts, dtypes: Sequence[str], parent: Manifest) -> dict[int, int]:
    """For each tensor, the parent's blob that may hold the same bytes; by name, shape and dtype."""
    found: dict[int, int] = {}
    for name, number in parts.names:
        other = parent.by_name.get(name)
        if other is None or number in found:
            continue
        row = parent.row(other)
        same = row.dtype == dtypes[number] and row.shape == tuple(parts.tensors[number].shape)
        if same and row.blob != NOTHING:
            found[number] = row.blob
    return found


def _metrics(metrics: Mapping[str, float]) -> dict[str, float]:
    found = {}
    for key, value in metrics.items():
        try:
            found[str(key)] = float(value)
        except (TypeError, ValueError):
            raise ConfigError(f"metrics[{key!r}] is {value!r}, expected a number") from None
        if math.isnan(found[str(key)]):
            raise StoreError(
                f"metrics[{key!r}] is not a number (NaN), by which nothing can be found or "
                "ordered: leave it away"
            )
    return found


def durability_of(wanted: Durability | str) -> Durability:
    """What a user named.

    Raises:
        ConfigError: it is not known.
    """
    if isinstance(wanted, Durability):
        return wanted
    known = {level.name.lower(): level for level in Durability}
    if wanted not in known:
        raise ConfigError(f"durability={wanted!r}, expected one of {', '.join(map(repr, known))}")
    return known[wanted]
