"""Multipart uploads, part by part: the few S3 calls that obstore keeps to itself.

An object made of parts appears when the upload is completed, whole. Until then it is an open
upload, which nobody sees but whoever asks for open uploads, and which costs room until it is
aborted.
"""

from __future__ import annotations

import html
import http.client
import logging
import random
import re
import ssl
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any
from urllib.parse import urlsplit

from sapwood.errors import AlreadyThere, StorageError
from sapwood.runtime import faults
from sapwood.runtime.heartbeat import beat
from sapwood.storage.s3.place import S3Place, failure
from sapwood.storage.s3.sigv4 import encoded_path, encoded_query, payload_hash, signed

__all__ = ["CopyPart", "DataPart", "Multipart", "OpenUpload", "UploadGoneError"]

log = logging.getLogger(__name__)
_FIRST_PAUSE, _LAST_PAUSE = 0.1, 5.0
_DICE = random.SystemRandom()  # the training's own random numbers are not ours to draw
_BUSY = (408, 429, 500, 502, 503, 504)
_CODES = {"NoSuchBucket": "no bucket", "AccessDenied": "denied"}


class UploadGoneError(StorageError):
    """Somebody completed or aborted the upload."""


@dataclass(frozen=True, slots=True)
class DataPart:
    """A part whose bytes are sent; they are asked for when its turn comes."""

    data: Callable[[], Any]


@dataclass(frozen=True, slots=True)
class CopyPart:
    """A part the server copies from another object of the place."""

    source: str
    start: int
    nbytes: int


@dataclass(frozen=True, slots=True, order=True)
class OpenUpload:
    """An upload that was begun and neither completed nor aborted."""

    name: str
    upload: str
    started: str
    """As the server says it: ISO 8601, UTC."""


class Multipart:
    """The calls. Safe to use from several threads: each request has a connection of its own."""

    def __init__(self, place: S3Place) -> None:
        """Nothing is opened before the first call."""
        self._place = place
        url = urlsplit(place.endpoint)
        self._host = url.netloc
        self._base = url.path
        self._tls = ssl.create_default_context() if url.scheme == "https" else None

    def begin(self, name: str, metadata: Mapping[str, str] = MappingProxyType({})) -> str:
        """Begin an upload of an object with this metadata; the answer is its id."""
        headers = {f"x-amz-meta-{key}": value for key, value in metadata.items()}
        _, text = self._call("create_upload", "POST", name, [("uploads", "")], headers=headers)
        return _field(text, "UploadId")

    def send(self, name: str, upload: str, number: int, part: DataPart | CopyPart) -> str:
        """Give a part, counted from 1; the answer is its tag, which ``complete`` wants."""
        query = [("partNumber", str(number)), ("uploadId", upload)]
        if isinstance(part, DataPart):
            headers, _ = self._call("upload_part", "PUT", name, query, part.data())
            return headers["etag"]
        source = f"/{self._place.bucket}/{self._place.key(part.source)}"
        extra = {
            "x-amz-copy-source": encoded_path(source),
            "x-amz-copy-source-range": f"bytes={part.start}-{part.start + part.nbytes - 1}",
        }
        _, text = self._call("copy_part", "PUT", name, query, headers=extra)
        return _field(text, "ETag")

    def complete(
        self, name: str, upload: str, tags: Sequence[str], *, replace: bool = True
    ) -> None:
        """Make the object appear.

        Raises:
            AlreadyThere: there is one, and ``replace`` is not set. Not every server tells this
                from what another upload does in the same moment.
        """
        rows = "".join(
            f"<Part><PartNumber>{n}</PartNumber><ETag>{html.escape(tag)}</ETag></Part>"
            for n, tag in enumerate(tags, 1)
        )
        body = f"<CompleteMultipartUpload>{rows}</CompleteMultipartUpload>".encode()
        headers = {} if replace else {"if-none-match": "*"}
        self._call("complete_upload", "POST", name, [("uploadId", upload)], body, headers)

    def part_times(self, name: str, upload: str) -> list[str]:
        """When the server got the first thousand parts of an upload, in ISO 8601, UTC."""
        try:
            _, text = self._call("list_parts", "GET", name, [("uploadId", upload)])
        except UploadGoneError:
            return []
        return re.findall(r"<LastModified>([^<]*)</LastModified>", text)

    def abort(self, name: str, upload: str) -> None:
        """Give an upload up; it is no error if it is gone."""
        try:
            self._call("abort_upload", "DELETE", name, [("uploadId", upload)])
        except UploadGoneError:
            log.debug("%s: upload %s is gone already", name, upload)

    def open_uploads(self, folder: str = "") -> list[OpenUpload]:
        """The open uploads below a folder of the place."""
        prefix = self._place.key(f"{folder}/" if folder else "")
        found: list[OpenUpload] = []
        more: list[tuple[str, str]] = []
        while True:
            query = [("uploads", ""), ("prefix", prefix), *more]
            _, text = self._call("list_uploads", "GET", None, query)
            for entry in re.findall(r"<Upload>(.*?)</Upload>", text, re.DOTALL):
                name = _field(entry, "Key").removeprefix(self._place.key(""))
                found.append(
                    OpenUpload(name, _field(entry, "UploadId"), _field(entry, "Initiated"))
                )
            if "<IsTruncated>true</IsTruncated>" not in text:
                return sorted(found)
            more = [
                ("key-marker", _field(text, "NextKeyMarker")),
                ("upload-id-marker", _field(text, "NextUploadIdMarker")),
            ]

    # -- requests ----------------------------------------------------------------------------

    def _call(
        self,
        op: str,
        method: str,
        name: str | None,
        query: Sequence[tuple[str, str]],
        body: Any = b"",
        headers: dict[str, str] | None = None,
    ) -> tuple[dict[str, str], str]:
        """One request, tried again while the server is busy or silent."""
        key = "" if name is None else f"/{self._place.key(name)}"
        path = f"{self._base}/{self._place.bucket}{key}"
        pause = _FIRST_PAUSE
        for left in range(self._place.retries, -1, -1):
            beat()
            faults.point("s3", op=op, object=name or "")
            try:
                status, answer, text = self._request(method, path, query, body, headers or {})
            except (OSError, http.client.HTTPException) as error:
                problem: Exception = failure(
                    self._place, f"{op} in", "unreachable", str(error) or type(error).__name__
                )
            else:
                if status < 300 and "<Error>" not in text:
                    return answer, text
                problem = self._refused(op, status, text)
                if status not in _BUSY and status >= 300:
                    raise problem
            if left == 0:
                raise problem
            time.sleep(_DICE.uniform(0.5, 1.0) * pause)  # not all engines at the same moment
            pause = min(2 * pause, _LAST_PAUSE)
        raise AssertionError("unreachable")

    def _request(
        self,
        method: str,
        path: str,
        query: Sequence[tuple[str, str]],
        body: Any,
        headers: dict[str, str],
    ) -> tuple[int, dict[str, str], str]:
        sent = signed(
            method=method,
            host=self._host,
            path=path,
            query=query,
            headers=headers,
            body_hash=payload_hash(body),
            credentials=self._place.credentials,
            region=self._place.region,
        )
        connection = self._connection()
        try:
            target = f"{encoded_path(path)}?{encoded_query(query)}"
            connection.request(method, target, body, {**sent, "content-length": str(len(body))})
            answer = connection.getresponse()
            text = answer.read().decode("utf-8", "replace")
            return answer.status, {k.lower(): v for k, v in answer.getheaders()}, text
        finally:
            connection.close()

    def _connection(self) -> http.client.HTTPConnection:
        timeout = self._place.timeout
        if self._tls is None:
            return http.client.HTTPConnection(self._host, timeout=timeout)
        return http.client.HTTPSConnection(self._host, timeout=timeout, context=self._tls)

    def _refused(self, op: str, status: int, text: str) -> StorageError:
        code = _field(text, "Code") if "<Code>" in text else str(status)
        if code == "PreconditionFailed":
            return AlreadyThere(f"{self._place}: there is such an object already")
        if code == "NoSuchUpload":
            return UploadGoneError(f"{self._place}: the upload was completed or aborted elsewhere")
        kind = "denied" if status in (401, 403) else _CODES.get(code, code)
        detail = _field(text, "Message") if "<Message>" in text else f"status {status}"
        return failure(self._place, f"{op} in", kind, detail)


def _field(text: str, name: str) -> str:
    found = re.search(rf"<{name}>([^<]*)</{name}>", text)
    if found is None:
        raise StorageError(f"an S3 server's answer has no {name}: {text[:200]!r}")
    return html.unescape(found[1])
