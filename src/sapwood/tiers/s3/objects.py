"""Objects of one place, through obstore; every request passes the fault point ``s3`` first."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

from sapwood.errors import ConfigError
from sapwood.runtime import faults
from sapwood.runtime.heartbeat import beat
from sapwood.tiers.s3.place import S3Place, failure

try:
    import obstore
    from obstore.exceptions import AlreadyExistsError, BaseError
    from obstore.store import S3Store
except ModuleNotFoundError as error:
    raise ConfigError("the s3 tier needs obstore; pip install 'sapwood[s3]'") from error

if TYPE_CHECKING:
    from obstore.store import S3Config

__all__ = ["Entry", "Objects"]

_CODE = re.compile(r"<Code>(\w+)</Code>")
_STATUS = re.compile(r"status code: (\d+)")
_PARALLEL_BYTES = 4 * 2**20
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

    def get(self, name: str) -> bytes:
        """A small object.

        Raises:
            FileNotFoundError: it is not there.
        """
        return self._do("get", name, lambda: bytes(obstore.get(self._store, name).bytes()))

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
