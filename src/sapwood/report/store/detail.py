"""One version: what is known of it, and its tensors, a page at a time."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from sapwood.errors import ModelNotFound
from sapwood.report.store.plain import brief, number, short, whole
from sapwood.report.store.sharing import Counted
from sapwood.repository.base import NOTHING, ModelRecord
from sapwood.repository.manifest import Manifest, TensorRow
from sapwood.repository.names import Reference
from sapwood.store import Repository

__all__ = ["list_tensors", "tensor_at", "version_facts"]

_METRICS = 200
_NOTE = 16_000
_CHILDREN = 50
_PAGE, _MOST = 200, 500
_DIMENSIONS = 16


def version_facts(repo: Repository, record: ModelRecord, manifest: Manifest) -> dict[str, Any]:
    """All about a version but its tensors."""
    metrics = [[short(k), number(v)] for k, v in list(record.metrics.items())[:_METRICS]]
    children = repo.children_of(record.id)
    dtypes: dict[str, int] = {}
    for dtype, nbytes in zip(manifest.dtypes, manifest.sizes, strict=True):
        dtypes[dtype] = dtypes.get(dtype, 0) + nbytes
    return {
        **brief(record),
        "metrics": metrics,
        "more_metrics": max(0, len(record.metrics) - _METRICS),
        "note": _note(record.note),
        "parent": _parent(repo, record),
        "children": [brief(child) for child in children[:_CHILDREN]],
        "more_children": max(0, len(children) - _CHILDREN),
        "names": len(manifest.names),
        "dtypes": sorted(dtypes.items(), key=lambda item: -item[1]),
        "graph": bool(manifest.graph),
    }


def _parent(repo: Repository, record: ModelRecord) -> dict[str, Any] | None:
    if record.parent is None:
        return None
    try:
        return brief(repo.by_id(record.parent, record.parent_name or ""))
    except ModelNotFound:
        # On a provider that is gone for good; the link is all that is left of it.
        name = record.parent_name or "?"
        return {"id": str(record.parent), "ref": name, "name": name, "removed": 0.0, "tags": []}


def _note(note: Mapping[str, Any]) -> str:
    return short(json.dumps(note, indent=2, ensure_ascii=True), _NOTE) if note else ""


def list_tensors(
    record: ModelRecord, manifest: Manifest, counted: Counted, query: Mapping[str, str]
) -> dict[str, Any]:
    """A page of a version's tensors, as they were saved or by size."""
    words = query.get("filter", "")[:1000].casefold().split()
    offset = whole(query, "offset", 0, least=0, most=10**9)
    limit = whole(query, "limit", _PAGE, least=1, most=_MOST)
    first = {number: at for at, (_, number) in reversed(list(enumerate(manifest.names)))}
    found = [
        (at, name, number)
        for at, (name, number) in enumerate(manifest.names)
        if all(_fits(word, name, manifest.dtypes[number]) for word in words)
    ]
    if query.get("sort") == "bytes":
        found.sort(key=lambda one: -manifest.sizes[one[2]])
    rows = []
    for at, name, place in found[offset : offset + limit]:
        row = manifest.row(place)
        tied = manifest.names[first[place]][0] if first[place] != at else None
        rows.append(
            {
                "at": at,
                "name": short(name),
                "dtype": row.dtype,
                "shape": _shape(row),
                "bytes": row.nbytes,
                "tied": None if tied is None else short(tied),
                "others": counted.others(record.id, row.blob) if row.blob != NOTHING else None,
            }
        )
    return {
        "total": len(found),
        "all": len(manifest.names),
        "offset": offset,
        "largest": max(manifest.sizes, default=0),
        "share": counted.shares.get(record.id),
        "sharing": counted.plain(),
        "rows": rows,
    }


def _fits(word: str, name: str, dtype: str) -> bool:
    return word in name.casefold() or word == dtype


def _shape(row: TensorRow) -> list[int | str]:
    if len(row.shape) <= _DIMENSIONS:
        return list(row.shape)
    return [*row.shape[:_DIMENSIONS], "…"]


def tensor_at(manifest: Manifest, at: int, reference: Reference) -> tuple[str, TensorRow]:
    """A tensor by the place of its name, for names may hold what no address can.

    Raises:
        ModelNotFound: there are not that many.
    """
    if at >= len(manifest.names):
        raise ModelNotFound(
            f"{reference} has {len(manifest.names)} tensors, and none of number {at}"
        )
    name, place = manifest.names[at]
    return name, manifest.row(place)
