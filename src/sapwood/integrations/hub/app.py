"""What is answered under which address: the part of the Hugging Face hub that reads models."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from functools import wraps
from math import isfinite
from typing import Any
from urllib.parse import parse_qs

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from sapwood.errors import ModelNotFound, SapwoodError
from sapwood.integrations.hub.answers import COMMIT, failure, file_answer
from sapwood.integrations.hub.guard import Guard
from sapwood.integrations.hub.library import (
    LATEST,
    Library,
    NoFile,
    NoFiles,
    NoModel,
    NoRevision,
    Version,
)
from sapwood.integrations.hub.names import commit_of, hub_id
from sapwood.repository.base import ModelRecord
from sapwood.store import Repository

__all__ = ["hub_app"]

_BODY = 2**20
"""Bytes of a list of paths that is asked about."""
_LISTED = 1000
"""Models of one answer, as at the hub."""
Answer = Callable[[Request], Response]


def hub_app(
    repo: Repository, *, token: str | None = None, hosts: Iterable[str] | None = None
) -> Starlette:
    """An ASGI application that gives out the models of a repository, and changes nothing.

    Args:
        repo: the repository; it stays the caller's to close.
        token: what clients must send as ``Authorization: Bearer``; None lets everybody read.
        hosts: the names it may be asked under, against DNS rebinding; None for any.
    """
    hub = _Hub(Library(repo))
    named = None if hosts is None else frozenset(hosts)
    return Starlette(
        routes=hub.routes(),
        middleware=[Middleware(Guard, token=token, hosts=named)],
        exception_handlers={HTTPException: _no_page},
    )


def _no_page(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code == 405:
        return failure(405, "this server only reads", Allow="GET, HEAD")
    # As for a dataset, a space, or another service of the hub.
    code = "RepoNotFound" if error.status_code == 404 else ""
    return failure(error.status_code, f"there is no {request.url.path} here", code=code)


def _answering(answer: Callable[[_Hub, Request], Response]) -> Callable[[_Hub, Request], Response]:
    """Errors of the repository as those of a hub."""

    @wraps(answer)
    def call(hub: _Hub, request: Request) -> Response:
        try:
            return answer(hub, request)
        except NoModel as error:
            return failure(404, str(error), code="RepoNotFound")
        except NoRevision as error:
            return failure(404, str(error), code="RevisionNotFound")
        except NoFile as error:
            return failure(404, str(error), code="EntryNotFound", commit=error.commit)
        except NoFiles as error:  # clients try again after a 500, and that would not help
            return failure(501, str(error))
        except ModelNotFound as error:  # removed since it was looked up
            return failure(404, str(error), code="RevisionNotFound")
        except SapwoodError as error:
            return failure(500, str(error))

    return call


class _Hub:
    """Answers requests. Plain functions run on threads of the server's."""

    def __init__(self, library: Library) -> None:
        self._library = library

    def routes(self) -> list[Route]:
        made = [Route("/api/models", self.models)]
        for id in ("{repo}", "{namespace}/{repo}"):
            made += [
                Route(f"/{id}/resolve/{{revision}}/{{path:path}}", self.resolve),
                Route(f"/{id}/raw/{{revision}}/{{path:path}}", self.resolve),
                Route(f"/api/models/{id}/revision/{{revision}}", self.info),
                Route(f"/api/models/{id}/tree/{{revision}}", self.tree),
                Route(f"/api/models/{id}/tree/{{revision}}/{{path:path}}", self.tree),
                Route(f"/api/models/{id}/refs", self.refs),
                Route(f"/api/models/{id}/commits/{{revision}}", self.commits),
                Route(
                    f"/api/models/{id}/paths-info/{{revision}}", self.paths_info, methods=["POST"]
                ),
            ]
        # Last, since the id of a model may look like the beginning of these.
        return [*made, *(Route(f"/api/models/{id}", self.info) for id in _IDS)]

    # -- files -------------------------------------------------------------------------------

    @_answering
    def resolve(self, request: Request) -> Response:
        return file_answer(request, self._version(request), request.path_params["path"])

    # -- listing -----------------------------------------------------------------------------

    @_answering
    def models(self, request: Request) -> Response:
        wanted = request.query_params.get("search", "").lower()
        author = request.query_params.get("author")
        found = [
            {**_facts(id, record), "sha": commit_of(record)}
            for id, record in self._library.latest().items()
            if wanted in id.lower() and author in (None, id.partition("/")[0])
        ]
        limit = request.query_params.get("limit", "")
        most = min(int(limit), _LISTED) if limit.isdecimal() and len(limit) < 9 else _LISTED
        return JSONResponse(found[:most])

    @_answering
    def info(self, request: Request) -> Response:
        version = self._version(request)
        blobs = request.query_params.get("blobs", "").lower() in ("true", "1")
        siblings = [
            {"rfilename": path, **({"size": file.size, "blobId": file.mark} if blobs else {})}
            for path, file in sorted(version.files.items())
        ]
        facts = _facts(hub_id(version.record.name), version.record)
        answer = {**facts, "sha": version.commit, "siblings": siblings}
        return JSONResponse(answer, headers={COMMIT: version.commit})

    @_answering
    def tree(self, request: Request) -> Response:
        version = self._version(request)
        path = request.path_params.get("path", "").strip("/")
        recursive = request.query_params.get("recursive", "").lower() in ("true", "1")
        expand = request.query_params.get("expand", "").lower() in ("true", "1")
        below = f"{path}/" if path else ""
        entries = _entries(version, expand=expand)
        if path and path in version.files:
            found = [entries[path]]
        else:
            found = [
                entry
                for name, entry in entries.items()
                if name.startswith(below) and (recursive or "/" not in name[len(below) :])
            ]
            if path and not found:
                raise NoFile(f"{version.record.reference} has no folder {path!r}", version.commit)
        return JSONResponse(found, headers={COMMIT: version.commit})

    async def paths_info(self, request: Request) -> Response:
        body = b""
        async for chunk in request.stream():
            body += chunk
            if len(body) > _BODY:
                return failure(413, f"expected a list of paths of at most {_BODY} bytes")
        try:
            asked = _form(request, body)
        except ValueError as error:
            return failure(400, f"expected a list of paths: {error}")
        return await run_in_threadpool(self._paths_info, request, asked)

    def _paths_info(self, request: Request, asked: Mapping[str, Any]) -> Response:
        @_answering
        def answer(hub: _Hub, request: Request) -> Response:
            version = hub._version(request)
            entries = _entries(version, expand=asked["expand"])
            found = [entries[path] for path in asked["paths"] if path in entries]
            return JSONResponse(found, headers={COMMIT: version.commit})

        return answer(self, request)

    @_answering
    def refs(self, request: Request) -> Response:
        records = self._library.records(_id(request))
        tags = {record.version: record for record in records}
        tags |= {tag: record for record in records for tag in record.tags}
        branches = [_ref("heads", LATEST, records[-1])] if records else []
        found = [_ref("tags", name, record) for name, record in tags.items()]
        return JSONResponse(
            {"branches": branches, "tags": found, "converts": [], "pullRequests": []}
        )

    @_answering
    def commits(self, request: Request) -> Response:
        """A version and those before it; a hub lists what a branch was made of."""
        version = self._version(request)
        records = [r for r in self._library.records(_id(request)) if r.id <= version.record.id]
        found = [{**_commit(record), "authors": [], "message": ""} for record in records[::-1]]
        return JSONResponse(found, headers={"X-Total-Count": str(len(found))})

    def _version(self, request: Request) -> Version:
        return self._library.version(_id(request), request.path_params.get("revision", LATEST))


_IDS = ("{repo}", "{namespace}/{repo}")


def _id(request: Request) -> str:
    found = request.path_params
    return "/".join(found[part] for part in ("namespace", "repo") if part in found)


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds")[:-6] + "Z"


def _facts(id: str, record: ModelRecord) -> dict[str, Any]:
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


def _commit(record: ModelRecord) -> dict[str, Any]:
    title = str(record.reference)
    return {"id": commit_of(record), "title": title, "date": _time(record.created)}


def _ref(kind: str, name: str, record: ModelRecord) -> dict[str, str]:
    return {"name": name, "ref": f"refs/{kind}/{name}", "targetCommit": commit_of(record)}


def _entries(version: Version, *, expand: bool) -> dict[str, dict[str, Any]]:
    """Every file and folder of a version, by path."""
    more: dict[str, Any] = {"lastCommit": _commit(version.record)} if expand else {}
    found: dict[str, dict[str, Any]] = {}
    for path, file in sorted(version.files.items()):
        for cut in (at for at, letter in enumerate(path) if letter == "/"):
            folder = {"type": "directory", "oid": version.commit, "size": 0, "path": path[:cut]}
            found.setdefault(path[:cut], {**folder, **more})
        found[path] = {"type": "file", "oid": file.mark, "size": file.size, "path": path, **more}
    return found


def _form(request: Request, body: bytes) -> dict[str, Any]:
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
