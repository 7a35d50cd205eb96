"""Objects of one place, through obstore; every request passes the fault point ``s3`` first."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal, TypeVar
from urllib.parse import urlsplit

from sapwood.errors import ConfigError
from sapwood.runtime import faults
from sapwood.runtime.heartbeat import beat
from sapwood.storage.preads import replaced
from sapwood.storage.s3.place import S3Place, failure

try:
    import obstore
    from obstore.exceptions import AlreadyExistsError, BaseError
    from obstore.store import S3Store
except ModuleNotFoundError as error:
    raise ConfigError("keeping bytes in S3 needs obstore; pip install 'sapwood[s3]'") from error

if TYPE_CHECKING:
    from obstore.store import S3Config

__all__ = ["MARK", "Entry", "Objects"]

MARK = "sapwood-draft"
"""Metadata of an object that tells its writer's draft from all others."""

_CODE = re.compile(r"<Code>(\w+)</Code>")
_STATUS = re.compile(r"status code: (\d+)")
_PARALLEL_BYTES = 4 * 2**20
_SIDE_BY_SIDE = 8
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Entry:
    """An object in a list."""

    size: int
    changed: float
    """Seconds since the epoch, by the server's clock, which counts whole seconds."""


class Objects:
    """Put, get, list and delete, by names below the place's prefix. Safe to use from threads."""

    def __init__(self, place: S3Place) -> None:
        """Nothing is opened before the first call."""
        self._place = place
        limit = timedelta(seconds=place.timeout)
        token: S3Config | None = (
            {"session_token": place.credentials.token} if place.credentials.token else None
        )
        self._store = S3Store(
            place.bucket,
            config=token,
            prefix=place.prefix or None,
            endpoint=place.endpoint,
            region=place.region,
            access_key_id=place.credentials.access_key,
            secret_access_key=place.credentials.secret_key,
            client_options={
                "allow_http": urlsplit(place.endpoint).scheme == "http",
                "timeout": limit,
                "connect_timeout": min(limit, timedelta(seconds=10)),
            },
            retry_config={
                "max_retries": place.retries,
                "retry_timeout": limit * (place.retries + 1),
            },
        )

    def put(self, name: str, data: Any) -> None:
        """Put a small object, in one request."""
        self._do("put", name, lambda: obstore.put(self._store, name, data, use_multipart=False))

    def create(self, name: str, data: bytes) -> bool:
        """Put an object unless one is there; False if one was."""
        try:
            self._do("create", name, lambda: obstore.put(self._store, name, data, mode="create"))
        except AlreadyExistsError:
            return False
        return True

    def put_marked(self, name: str, parts: Sequence[Any], mark: str, *, replace: bool) -> bool:
        """Put buffers as one object in one request; False if there was one, and not to be replaced.

        ``mark`` stays with it. An answer that got lost is asked for again, and would say that there
        is an object: our own.
        """
        body: Any = list(parts) if len(parts) > 1 else (parts[0] if parts else b"")
        if replace:
            self._do("put", name, lambda: self._put_body(name, body, "overwrite", mark))
            return True
        try:
            self._do("create", name, lambda: self._put_body(name, body, "create", mark))
        except AlreadyExistsError:
            return self.mark(name) == mark
        return True

    def _put_body(
        self, name: str, body: Any, mode: Literal["create", "overwrite"], mark: str
    ) -> None:
        attributes: Any = {MARK: mark}
        obstore.put(self._store, name, body, mode=mode, attributes=attributes, use_multipart=False)

    def mark(self, name: str) -> str | None:
        """What whoever put an object marked it with; None if nothing, or if it is not there."""
        try:
            found = self._do(
                "head", name, lambda: obstore.get(self._store, name, options={"head": True})
            )
        except FileNotFoundError:
            return None
        attributes: Any = found.attributes
        mark: str | None = attributes.get(MARK)
        return mark

    def get(self, name: str) -> bytes:
        """A small object.

        Raises:
            FileNotFoundError: it is not there.
        """
        return self._do("get", name, lambda: bytes(obstore.get(self._store, name).bytes()))

    def get_up_to(self, name: str, limit: int) -> bytes | int:
        """An object, or its size, if that is more than ``limit``: then the transfer is broken off.

        Raises:
            FileNotFoundError: it is not there.
        """

        def request() -> bytes | int:
            found = obstore.get(self._store, name)
            size = int(found.meta["size"])
            return size if size > limit else bytes(found.bytes())

        return self._do("get", name, request)

    def ranges(self, name: str, wanted: Sequence[tuple[int, int]]) -> Sequence[Any]:
        """Bytes from given offsets on, in order, each in a request of its own, side by side.

        Raises:
            FileNotFoundError: it is not there.
            StorageError: it was replaced meanwhile.
        """
        # One by one: of ranges that touch, obstore's get_ranges makes one request, however long.
        threads = min(_SIDE_BY_SIDE, len(wanted))

        def request() -> list[tuple[str | None, Any]]:
            if threads == 1:
                return [self._range(name, *part) for part in wanted]
            with ThreadPoolExecutor(threads, thread_name_prefix="sapwood-s3-read") as pool:
                return list(pool.map(lambda part: self._range(name, *part), wanted))

        found = self._do("read", name, request)
        if len({tag for tag, _ in found}) > 1:
            raise replaced(f"{self._place}/{name}")
        return [data for _, data in found]

    def _range(self, name: str, start: int, nbytes: int) -> tuple[str | None, Any]:
        found = obstore.get(self._store, name, options={"range": (start, start + nbytes)})
        return found.meta["e_tag"], found.bytes()

    def read(self, name: str, start: int, out: Any) -> None:
        """Fill ``out`` with the bytes from ``start`` on, in a few requests side by side.

        Raises:
            FileNotFoundError: it is not there.
        """
        target = memoryview(out).cast("B")
        cuts = range(0, len(target), _PARALLEL_BYTES)
        wanted = [(start + cut, target[cut : cut + _PARALLEL_BYTES]) for cut in cuts]
        self.read_all(name, wanted, coalesce=0)

    def read_all(
        self, name: str, wanted: Sequence[tuple[int, memoryview]], *, coalesce: int = 2**20
    ) -> None:
        """Fill buffers with the bytes from given offsets on; near ones share a request.

        Raises:
            FileNotFoundError: it is not there.
        """
        starts, lengths = [at for at, _ in wanted], [len(out) for _, out in wanted]
        if not coalesce:
            found = self.ranges(name, list(zip(starts, lengths, strict=True)))
        else:
            found = self._do(
                "read",
                name,
                lambda: obstore.get_ranges(
                    self._store, name, starts=starts, lengths=lengths, coalesce=coalesce
                ),
            )
        for (_, out), data in zip(wanted, found, strict=True):
            out[:] = memoryview(data)

    def size(self, name: str) -> int | None:
        """The size of an object; None if it is not there."""
        try:
            return self._do("head", name, lambda: int(obstore.head(self._store, name)["size"]))
        except FileNotFoundError:
            return None

    def names(self, folder: str | None = None) -> list[str]:
        """All objects below a folder (None: below the prefix), however many pages they fill."""
        return list(self.entries(folder))

    def entries(self, folder: str | None = None) -> dict[str, Entry]:
        """The same, with what the server knows of each."""
        found = self._do("list", folder or "", lambda: obstore.list(self._store, folder).collect())
        rows = sorted((str(o["path"]), int(o["size"]), o["last_modified"]) for o in found)
        return {path: Entry(size, moment.timestamp()) for path, size, moment in rows}

    def delete(self, names: Sequence[str]) -> None:
        """Delete objects; it is no error if some are not there."""
        if names:
            self._do("delete", names[0], lambda: obstore.delete(self._store, list(names)))

    def _do(self, op: str, name: str, request: Callable[[], T]) -> T:
        beat()
        faults.point("s3", op=op, object=name)
        try:
            return request()
        except (FileNotFoundError, BaseError) as error:
            text = str(error)
            code = _CODE.search(text)
            status = _STATUS.search(text)
            missing = isinstance(error, FileNotFoundError)
            if isinstance(error, AlreadyExistsError) or (
                missing and not (code and code[1] == "NoSuchBucket")
            ):
                raise
            kind = _kind(code[1] if code else "", int(status[1]) if status else 0)
            detail = text.partition("\n")[0]
            raise failure(self._place, f"{op} {name or 'objects'} in", kind, detail) from error


def _kind(code: str, status: int) -> str:
    if code == "NoSuchBucket":
        return "no bucket"
    if status in (401, 403):
        return "denied"
    return code or (str(status) if status else "unreachable")
