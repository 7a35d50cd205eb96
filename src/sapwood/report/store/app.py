"""Which address answers what. Nothing but this server's own page asks; see ``guards``."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp

from sapwood._version import __version__
from sapwood.errors import (
    BadName,
    ConfigError,
    Denied,
    Gone,
    ModelExists,
    ModelNotFound,
    SapwoodError,
)
from sapwood.report.store.assets import Assets
from sapwood.report.store.changes import Changes, Conflict
from sapwood.report.store.comparison import KINDS, Difference, differences, page_of, summary
from sapwood.report.store.detail import list_tensors, tensor_at, version_facts
from sapwood.report.store.guards import Guard
from sapwood.report.store.histogram import Histogram, histogram
from sapwood.report.store.jobs import Cancelled, Job, Jobs, Kept
from sapwood.report.store.lineage import around
from sapwood.report.store.plain import Json, brief, line, short, whole
from sapwood.report.store.sharing import Sharing
from sapwood.report.store.versions import Versions, list_models, list_versions, parse_listing
from sapwood.repository.base import NOTHING
from sapwood.store import Repository
from sapwood.store.stored import StoredModel

__all__ = ["Page"]

log = logging.getLogger(__name__)
_STATUS: tuple[tuple[type[Exception], int], ...] = (
    (ModelNotFound, 404),
    (BadName, 400),
    (ConfigError, 400),
    (Denied, 403),
    (Conflict, 409),
    (ModelExists, 409),
    (Gone, 410),
    (SapwoodError, 500),
)
_PAGE, _MOST = 200, 500


class Page:
    """The page of a repository. Owns its threads, which ``close`` ends, but not the repository."""

    def __init__(self, repo: Repository, *, place: str, token: str | None = None) -> None:
        """``place`` is the repository's name for people; with a ``token`` changes are possible."""
        self._repo = repo
        self._place = place
        self._versions = Versions(repo)
        self._sharing = Sharing(repo, self._versions)
        self._changes = Changes(repo, token)
        self._jobs = Jobs()
        self._histograms: Kept[Histogram] = Kept(200)
        self._differences: Kept[list[Difference]] = Kept(8)
        self._assets = Assets()

    def app(self) -> ASGIApp:
        """What the server calls."""
        reads: dict[str, Callable[[Request], Any]] = {
            "session": self._session,
            "versions": self._list_versions,
            "models": self._list_models,
            "sharing": self._list_sharing,
            "version": self._version,
            "tensors": self._tensors,
            "lineage": self._lineage,
            "differences": self._page_of_differences,
        }
        routes = [Route(f"/api/{name}", _answering(call)) for name, call in reads.items()]
        routes += [
            Route("/api/histogram", self._histogram),
            Route("/api/compare", self._compare),
            Route("/api/{what:str}", self._change, methods=["POST"]),
            Route("/", self._file),
            Route("/static/{name:str}", self._file),
        ]
        handlers: Mapping[Any, Any] = {
            SapwoodError: _refused,
            Cancelled: _cancelled,
            Exception: _failed,
        }
        return Guard(Starlette(routes=routes, exception_handlers=handlers))

    def close(self) -> None:
        """End what runs in the background. Calling it again does nothing."""
        self._jobs.close()
        self._sharing.close()

    # -- lists -------------------------------------------------------------------------------

    def _session(self, request: Request) -> Any:
        return {
            "place": self._place,
            "sapwood": __version__,
            "writable": self._changes.possible,
            "unlocked": self._changes.allowed(request.headers),
        }

    def _list_versions(self, request: Request) -> Any:
        found = list_versions(self._versions.all(), parse_listing(request.query_params))
        return self._with_shares(found)

    def _list_models(self, request: Request) -> Any:
        found = list_models(self._versions.all(), parse_listing(request.query_params))
        return self._with_shares(found)

    def _with_shares(self, found: dict[str, Any]) -> dict[str, Any]:
        counted = self._sharing.wake()
        for row in found["rows"]:
            row["share"] = counted.shares.get(int(row["id"]))
        return {**found, "sharing": counted.plain()}

    def _list_sharing(self, request: Request) -> Any:
        return self._sharing.wake().plain()

    # -- one version -------------------------------------------------------------------------

    def _opened(self, request: Request, key: str = "ref") -> StoredModel:
        reference = request.query_params.get(key, "")
        return self._repo.open(reference)

    def _version(self, request: Request) -> Any:
        stored = self._opened(request)
        return version_facts(self._repo, stored.record, stored.manifest)

    def _tensors(self, request: Request) -> Any:
        stored = self._opened(request)
        counted = self._sharing.wake()
        return list_tensors(stored.record, stored.manifest, counted, request.query_params)

    def _lineage(self, request: Request) -> Any:
        return around(self._repo, self._repo.info(request.query_params.get("ref", "")))

    async def _histogram(self, request: Request) -> Response:
        stored = await run_in_threadpool(self._opened, request)
        at = whole(request.query_params, "at", 0, least=0, most=10**9)
        name, row = tensor_at(stored.manifest, at, stored.record.reference)
        facts = {"name": short(name), "dtype": row.dtype, "bytes": row.nbytes}
        if row.blob == NOTHING:
            return Json({**facts, **Histogram(count=0).plain()})
        key = (stored.record.id, row.number)
        found = self._histograms.get(key)
        if found is None:
            job = self._jobs.start(lambda job: _counted(job, stored, at))
            async for _ in job.until_done():
                if await request.is_disconnected():
                    job.cancel()
                    raise Cancelled
            found = self._histograms.keep(key, job.result())
        return Json({**facts, **found.plain()})

    # -- two versions ------------------------------------------------------------------------

    async def _compare(self, request: Request) -> Response:
        """Lines of JSON: how far it is, and at last what was found, or an error."""
        before = await run_in_threadpool(self._opened, request, "before")
        after = await run_in_threadpool(self._opened, request, "after")
        key = (before.record.id, after.record.id)
        ends = {"before": brief(before.record), "after": brief(after.record)}
        found = self._differences.get(key)
        if found is not None:
            return Response(line({**ends, "found": summary(found)}), media_type=_LINES)

        async def lines() -> AsyncIterator[bytes]:
            yield line(ends) + b"\n"
            try:
                # Begun here, for who has left already never comes so far.
                job = self._jobs.start(lambda job: self._compared(job, before, after))
                async for done, total, what in job.until_done():
                    yield line({"done": done, "total": total, "what": short(what)}) + b"\n"
                found = self._differences.keep(key, job.result())
                yield line({**ends, "found": summary(found)}) + b"\n"
            except SapwoodError as error:
                yield line({"error": str(error)}) + b"\n"
            except Cancelled:
                yield line({"error": "this was cancelled"}) + b"\n"

        return StreamingResponse(lines(), media_type=_LINES)

    def _compared(
        self, job: Job[list[Difference]], before: StoredModel, after: StoredModel
    ) -> list[Difference]:
        blobs = {*before.manifest.blobs, *after.manifest.blobs}
        canonical = self._repo.canonical(sorted(blobs)) or {}
        return differences(before, after, canonical, job.advance)

    def _page_of_differences(self, request: Request) -> Any:
        query = request.query_params
        before = self._repo.info(query.get("before", ""))
        after = self._repo.info(query.get("after", ""))
        found = self._differences.get((before.id, after.id))
        if found is None:
            raise Gone("these versions have to be compared again")
        kind = query.get("kind", "")
        if kind and kind not in KINDS:
            raise ConfigError(f"kind is {short(kind, 40)!r}, expected one of {', '.join(KINDS)}")
        offset = whole(query, "offset", 0, least=0, most=10**9)
        limit = whole(query, "limit", _PAGE, least=1, most=_MOST)
        return page_of(found, kind=kind, sort=query.get("sort", ""), offset=offset, limit=limit)

    # -- changes, files ----------------------------------------------------------------------

    async def _change(self, request: Request) -> Response:
        what = request.path_params["what"]
        if what not in ("tag", "untag", "remove"):
            return Json({"error": "there is nothing here"}, status_code=404)
        body = await request.body()
        done = await run_in_threadpool(self._changes.apply, what, request.headers, body)
        self._versions.forget()
        return Json(done)

    async def _file(self, request: Request) -> Response:
        found = self._assets.get(request.path_params.get("name", "index.html"))
        return found or Json({"error": "there is nothing here"}, status_code=404)


_LINES = "application/x-ndjson"


def _answering(call: Callable[[Request], Any]) -> Callable[[Request], Response]:
    """Starlette runs it in a thread, for the catalog may wait for others."""

    def answer(request: Request) -> Response:
        return Json(call(request))

    return answer


def _counted(job: Job[Histogram], stored: StoredModel, at: int) -> Histogram:
    name, row = tensor_at(stored.manifest, at, stored.record.reference)

    def blocks() -> Any:
        done = 0
        for block in stored.blocks(row):
            job.advance(done, 2 * row.nbytes, name)
            done += len(block)
            yield block

    return histogram(blocks, row.dtype)


async def _refused(request: Request, error: Exception) -> Response:
    status = next(status for kind, status in _STATUS if isinstance(error, kind))
    if status == 500:
        log.warning("%s: %s", request.url.path, error)
    return Json({"error": str(error)}, status_code=status)


async def _cancelled(request: Request, error: Exception) -> Response:
    return Json({"error": "this was cancelled"}, status_code=503)


async def _failed(request: Request, error: Exception) -> Response:
    return Json({"error": f"{type(error).__name__}; see the server's log"}, status_code=500)
