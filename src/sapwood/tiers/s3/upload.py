"""Large objects, made of parts that travel side by side."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from sapwood.errors import StorageError
from sapwood.storage.s3.multipart import CopyPart, DataPart, Multipart
from sapwood.storage.s3.objects import Objects

__all__ = ["PART", "upload", "upload_bytes"]

log = logging.getLogger(__name__)
PART = 16 * 2**20
_MOST_PARTS = 9000
_SIDE_BY_SIDE = 4


def upload_bytes(objects: Objects, multipart: Multipart, name: str, data: memoryview) -> None:
    """Put an object of any size."""
    if len(data) <= PART:
        objects.put(name, data)
        return
    step = max(PART, -(-len(data) // _MOST_PARTS))
    cuts = range(0, len(data), step)
    parts = [DataPart(lambda cut=cut: data[cut : cut + step]) for cut in cuts]  # type: ignore[misc]
    upload(multipart, name, parts)


def upload(multipart: Multipart, name: str, parts: Sequence[DataPart | CopyPart]) -> None:
    """Make an object of parts; if that fails, nothing of it stays.

    Raises:
        StorageError: it could not be done now.
    """
    id = multipart.begin(name)
    try:
        tags = _send_all(multipart, name, id, parts)
        multipart.complete(name, id, tags)
    except BaseException:
        _abort(multipart, name, id)
        raise


def _send_all(
    multipart: Multipart, name: str, id: str, parts: Sequence[DataPart | CopyPart]
) -> list[str]:
    with ThreadPoolExecutor(_SIDE_BY_SIDE, thread_name_prefix="sapwood-s3") as pool:
        jobs = [pool.submit(multipart.send, name, id, n, part) for n, part in enumerate(parts, 1)]
        try:
            return [job.result() for job in jobs]
        except BaseException:
            pool.shutdown(wait=True, cancel_futures=True)
            raise


def _abort(multipart: Multipart, name: str, id: str) -> None:
    try:
        multipart.abort(name, id)
    except StorageError as error:
        log.warning("%s: an upload could not be aborted, drop will: %s", name, error)
