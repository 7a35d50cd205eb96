"""Making a checkpoint a version that everybody sees: at once, and only when it is whole."""

from __future__ import annotations

import math
from dataclasses import replace

from sapwood.errors import ModelExists, TierError
from sapwood.repository.base import Backend, ModelRecord, NewModel
from sapwood.repository.manifest import Manifest
from sapwood.runtime import faults
from sapwood.state.safetensors import TORCH_NAMES
from sapwood.storage import Durability
from sapwood.tiers.metrics import metrics_of
from sapwood.tiers.versions.draft import VersionDraft
from sapwood.tiers.versions.facts import Facts, Origin, home_of
from sapwood.tiers.versions.family import find_saved, model_name, parent_of
from sapwood.tiers.versions.index import Index, Version
from sapwood.tiers.versions.parts import CheckpointParts
from sapwood.tiers.versions.staging import same_tensor
from sapwood.tiers.versions.structure import names_of, structure_of_model

__all__ = ["publish"]

_EMPTY = Manifest((), (), (), (), None)


def publish(
    backend: Backend,
    origin: Origin,
    parts: CheckpointParts,
    known: Version | None,
    durability: Durability,
) -> ModelRecord:
    """Make the version of a checkpoint; it is no error if somebody else has done it.

    ``known`` is an earlier version that tensors may be unchanged since.

    Raises:
        CheckpointError: the shards do not belong together.
        StoreError, StorageError: it cannot be done now.
    """
    first = parts.first
    parts.check(f"checkpoint {first.id} in {backend.name}")
    with VersionDraft(backend, home_of(origin.series, first.id), durability) as draft:
        index = _fill(draft, parts, known)
        names = names_of(first.catalog, index.tensors, first.extras.get("tied", {}))
        structure = structure_of_model(
            first.catalog, names, index.tensors, first.extras, parts.region(backend)
        )
        number = draft.add_bytes(index.encode())
        parent = parent_of(backend, origin, first.id, first.lineage)
        model = NewModel(
            name=model_name(origin, first.lineage),
            version=None,
            manifest=_EMPTY,
            parent=None if parent is None else parent.id,
            parent_name=None if parent is None else parent.name,
            metrics={k: v for k, v in metrics_of(first.extras).items() if math.isfinite(v)},
            note=_facts(origin, parts, number).note(),
        )
        return _save(backend, origin, draft, model, parts, names, structure)


def _fill(draft: VersionDraft, parts: CheckpointParts, known: Version | None) -> Index:
    """Add all tensors, extras and records of a checkpoint."""
    tensors = {}
    for entry in parts.first.catalog.entries:
        alike = same_tensor(known, entry)
        tensors[entry.key] = draft.add(
            TORCH_NAMES[entry.dtype], entry.shape, parts.of(entry), alike
        )
    extras = {
        rank: draft.add("uint8", (source.nbytes,), [source])
        for rank, source in parts.extras.items()
    }
    records = tuple(draft.add_bytes(content) for _, content in sorted(parts.contents.items()))
    return Index(tensors, records, extras)


def _facts(origin: Origin, parts: CheckpointParts, index: int) -> Facts:
    first = parts.first
    return Facts(
        id=first.id,
        run=model_name(Origin(series="", name=""), first.lineage),
        series=origin.series,
        world=first.world,
        created=max(record.created for record in parts.records.values()),
        index=index,
    )


def _save(
    backend: Backend,
    origin: Origin,
    draft: VersionDraft,
    model: NewModel,
    parts: CheckpointParts,
    names: tuple[tuple[str, int], ...],
    structure: object,
) -> ModelRecord:
    """Save it under its step; a training that came to the step again adds its attempt."""
    first = parts.first
    step = f"step-{first.id.step}"
    for version in (step, f"{step}-{first.id.attempt}"):
        faults.point("tiers.publish", step=first.id.step, version=version)
        wanted = replace(model, version=version)
        try:
            return draft.save(wanted, names, structure)
        except ModelExists:
            run = model_name(Origin(series="", name=""), first.lineage)
            there = find_saved(backend, origin, first.id, run)
            if there is not None:  # another rank's engine was faster
                return there.record
    raise TierError(
        f"{model.name}@{step} and {model.name}@{step}-{first.id.attempt} are other versions in "
        f"{backend.name}: give this training a name of its own, TierSpec(kind='store', name=...)"
    )
