"""Answers: a file or ranges of it, and errors in the form a hub's clients understand."""

from __future__ import annotations

import logging
import mimetypes
import secrets
from collections.abc import Iterator, Sequence
from itertools import chain

from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from sapwood.errors import SapwoodError
from sapwood.integrations.hub.library import Version
from sapwood.integrations.hub.ranges import Unsatisfiable, parse_ranges
from sapwood.store.exchange import OutFile

__all__ = ["COMMIT", "failure", "file_answer"]

log = logging.getLogger(__name__)
COMMIT = "X-Repo-Commit"


def failure(
    status: int, message: str, *, code: str = "", commit: str = "", **headers: str
) -> Response:
    """An error; ``code`` is what the hub's clients know it by."""
    # Header lines hold no other characters, and a message may quote what a client sent.
    plain = "".join(letter if letter.isprintable() else " " for letter in message)
    line = " ".join(plain.split()).encode("ascii", "backslashreplace").decode()[:1000]
    given = {"X-Error-Code": code, COMMIT: commit, "X-Error-Message": line}
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    kept = {name: value for name, value in given.items() if value} | named
    return JSONResponse({"error": message}, status, kept)


def file_answer(request: Request, version: Version, path: str) -> Response:
    """A file, or the ranges of it that were asked for; for HEAD what is known of it.

    Raises:
        NoFile: there is none of that name.
        SapwoodError: it cannot be read.
    """
    file = version.file(path)
    etag = f'"{file.mark}"'
    headers = {
        "ETag": etag,
        "Accept-Ranges": "bytes",
        COMMIT: version.commit,
        "X-Linked-Size": str(file.size),
        "X-Linked-Etag": etag,
        "X-Content-Type-Options": "nosniff",
        # A page that a model brings along is never shown as one of this server's.
        "Content-Disposition": "attachment",
    }
    if _has(request.headers.get("if-none-match"), etag):
        return Response(status_code=304, headers=headers)
    kind = mimetypes.guess_type(path)[0] or "application/octet-stream"
    if request.method == "HEAD":
        headers |= {"Content-Length": str(file.size), "Content-Type": kind}
        return Response(headers=headers)
    try:
        ranges = parse_ranges(_wanted(request, etag), file.size)
    except Unsatisfiable:
        whole = f"bytes */{file.size}"
        answer = failure(416, f"{path} has {file.size} bytes, and none of that range")
        answer.headers["Content-Range"] = whole
        return answer
    return _content(file, ranges, kind, headers)


def _wanted(request: Request, etag: str) -> str | None:
    """The Range header, unless it is of another version of the file."""
    condition = request.headers.get("if-range")
    if condition is not None and condition.strip() != etag:
        return None
    return request.headers.get("range")


def _has(header: str | None, etag: str) -> bool:
    if header is None:
        return False
    tags = [one.strip().removeprefix("W/") for one in header.split(",")]
    return etag in tags or "*" in tags


def _content(
    file: OutFile, ranges: Sequence[tuple[int, int]] | None, kind: str, headers: dict[str, str]
) -> Response:
    if ranges is None:
        return _stream(_bytes(file, 0, file.size), file.size, 200, kind, headers)
    if len(ranges) == 1:
        ((start, stop),) = ranges
        headers |= {"Content-Range": f"bytes {start}-{stop - 1}/{file.size}"}
        return _stream(_bytes(file, start, stop), stop - start, 206, kind, headers)
    mark = secrets.token_hex(16)
    heads = [
        f"--{mark}\r\nContent-Type: {kind}\r\n"
        f"Content-Range: bytes {start}-{stop - 1}/{file.size}\r\n\r\n".encode()
        for start, stop in ranges
    ]
    end = f"--{mark}--\r\n".encode()
    size = len(end) + sum(
        len(head) + stop - start + 2 for head, (start, stop) in zip(heads, ranges, strict=True)
    )
    parts = (
        chain((head,), _bytes(file, *bounds), (b"\r\n",))
        for head, bounds in zip(heads, ranges, strict=True)
    )
    body = chain(chain.from_iterable(parts), (end,))
    return _stream(body, size, 206, f"multipart/byteranges; boundary={mark}", headers)


def _bytes(file: OutFile, start: int, stop: int) -> Iterator[bytes]:
    """Blocks of a file's bytes, of their own memory: what was sent may be on its way for long."""
    return map(bytes, file.blocks(start, stop))


def _stream(
    body: Iterator[bytes], size: int, status: int, kind: str, headers: dict[str, str]
) -> Response:
    # What cannot be read at all is an error, and not an answer that ends too early.
    first = next(body, b"")
    headers = headers | {"Content-Length": str(size), "Content-Type": kind}
    return StreamingResponse(_told(chain((first,), body)), status, headers)


def _told(body: Iterator[bytes]) -> Iterator[bytes]:
    try:
        yield from body
    except SapwoodError as error:
        log.error("a file ends too early: %s", error)
        raise
