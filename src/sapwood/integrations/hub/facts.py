"""What is said of models, versions and files, in the words of the hub's own answers."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from math import isfinite
from typing import Any
from urllib.parse import parse_qs

from starlette.requests import Request

from sapwood.integrations.hub.library import Version
from sapwood.integrations.hub.names import commit_of
from sapwood.repository.base import ModelRecord

__all__ = ["commit_facts", "entries_of", "facts_of", "paths_asked", "ref_of"]


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds")[:-6] + "Z"


def facts_of(id: str, record: ModelRecord) -> dict[str, Any]:
    """What a hub says of a model, and what this one knows beside."""
    return {
        "_id": f"{record.id:024x}",
        "id": id,
        "modelId": id,
        "private": False,
        "gated": False,
        "disabled": False,
        "downloads": 0,
        "likes": 0,
        "tags": list(record.tags),
        "createdAt": _time(record.created),
        "lastModified": _time(record.created),
        "sapwood": {
            "name": record.name,
            "version": record.version,
            # JSON has no word for infinity.
            "metrics": {k: v if isfinite(v) else repr(v) for k, v in record.metrics.items()},
        },
    }


def commit_facts(record: ModelRecord) -> dict[str, Any]:
    title = str(record.reference)
    return {"id": commit_of(record), "title": title, "date": _time(record.created)}


def ref_of(kind: str, name: str, record: ModelRecord) -> dict[str, str]:
    return {"name": name, "ref": f"refs/{kind}/{name}", "targetCommit": commit_of(record)}


def entries_of(version: Version, *, expand: bool) -> dict[str, dict[str, Any]]:
    """Every file and folder of a version, by path."""
    more: dict[str, Any] = {"lastCommit": commit_facts(version.record)} if expand else {}
    found: dict[str, dict[str, Any]] = {}
    for path, file in sorted(version.files.items()):
        for cut in (at for at, letter in enumerate(path) if letter == "/"):
            folder = {"type": "directory", "oid": version.commit, "size": 0, "path": path[:cut]}
            found.setdefault(path[:cut], {**folder, **more})
        found[path] = {"type": "file", "oid": file.mark, "size": file.size, "path": path, **more}
    return found


def paths_asked(request: Request, body: bytes) -> dict[str, Any]:
    """The paths that are asked about, as a form or as JSON.

    Raises:
        ValueError: it is neither.
    """
    if request.headers.get("content-type", "").startswith("application/json"):
        given = json.loads(body)
        if not isinstance(given, dict):
            raise ValueError("it is no object")
        paths, expand = given.get("paths", []), given.get("expand", False)
    else:
        form = parse_qs(body.decode(), max_num_fields=10_000)
        paths, expand = form.get("paths", []), form.get("expand", ["false"])[0]
    paths = [paths] if isinstance(paths, str) else paths
    if not isinstance(paths, list) or not all(isinstance(path, str) for path in paths):
        raise ValueError("paths are texts")
    return {"paths": dict.fromkeys(paths), "expand": str(expand).lower() in ("true", "1")}
