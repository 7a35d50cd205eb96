"""Keep an index in a file beside its database, and tell when it no longer fits.

The file is a head of one page (what it is of, and checksums), then the four arrays one after the
other, each on an 8-byte boundary, so that many processes can map a large one and share its memory.
"""

from __future__ import annotations

import hashlib
import json
import logging
import mmap
import os
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

import numpy as np

from sapwood.data.check import database_name, require_instance, require_path
from sapwood.data.index import Index, build_index
from sapwood.data.lock import alone
from sapwood.data.pagefile import Fingerprint, data_file, open_pages
from sapwood.errors import ConfigError, DataError, SapwoodError
from sapwood.regular import open_regular
from sapwood.storage.files import Files, draft_of
from sapwood.tiers.digest import DEFAULT_ALGORITHM, digest, matches, seal, unseal

__all__ = ["index_file", "load_index", "open_index", "save_index"]

_log = logging.getLogger(__name__)

SUFFIX = ".sapwood-index"
_HEAD = 4096
_PATIENCE = 600.0
"""Seconds for another process to make an index; then one is made here as well."""
_COPIED = 32 * 2**20
"""Up to here an index is read: one that is copied over the kept one, together with its database,
would end a process that has it mapped. A larger one is mapped, for all ranks of a host to share."""
_MARK = "sapwood index"
_ARRAYS = {"offsets": "<i8", "key_offsets": "<i8", "lengths": "<u4", "key_lengths": "<u2"}

Stale = Literal["rebuild", "refuse"]


def index_file(path: str | os.PathLike[str], database: str | bytes | None = None) -> Path:
    """Where the index of a database is kept: beside it, or in the user's cache if it cannot be."""
    file = data_file(path).absolute()
    name = database_name(database)
    mark = "" if name is None else "." + hashlib.blake2b(name, digest_size=6).hexdigest()
    beside = file.with_name(file.name + mark + SUFFIX)
    if beside.exists() or os.access(file.parent, os.W_OK):
        return beside
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    whose = hashlib.blake2b(os.fsencode(file), digest_size=12).hexdigest()
    return cache / "sapwood" / "index" / f"{file.name}.{whose}{mark}{SUFFIX}"


def open_index(
    path: str | os.PathLike[str],
    database: str | bytes | None = None,
    *,
    file: str | os.PathLike[str] | None = None,
    when_stale: Stale = "rebuild",
) -> Index:
    """The index of a database: the one kept, if it fits, or a new one, which is then kept.

    ``file`` says where it is kept, other than ``index_file``. ``when_stale`` says what to do if
    the one kept is damaged or of another state of the database; one that is missing is made in
    either case. A place that cannot be written is logged, and no error.

    Raises:
        ConfigError: ``when_stale`` is neither.
        DataError: as ``build_index``, or the kept one does not fit and is not to be replaced.
    """
    if when_stale not in ("rebuild", "refuse"):
        raise ConfigError(f"when_stale={when_stale!r}: expected 'rebuild' or 'refuse'")
    kept = index_file(path, database) if file is None else Path(require_path("file", file))
    found = _kept(kept, path, database, when_stale)
    if found is not None:
        return found
    if not _writable(kept.parent):  # then each has to make its own
        return _made(kept, path, database)
    with alone(data_file(path), _PATIENCE) as waited:
        # All ranks of a host come here at the same time; the first one works for all of them.
        found = _kept(kept, path, database, when_stale) if waited else None
        return _made(kept, path, database) if found is None else found


def _kept(
    kept: Path, path: str | os.PathLike[str], database: str | bytes | None, when_stale: Stale
) -> Index | None:
    """The index that is kept, if there is one and it fits."""
    if not kept.exists():
        return None
    try:
        return load_index(kept, path, database)
    except DataError as error:
        if when_stale == "refuse":
            raise
        _log.info("a new index is made: %s", error)
        return None


def _writable(folder: Path) -> bool:
    """Whether something can be put there, if need be in a new folder."""
    there = next((one for one in (folder, *folder.parents) if one.exists()), folder)
    return os.access(there, os.W_OK)


def _made(kept: Path, path: str | os.PathLike[str], database: str | bytes | None) -> Index:
    index = build_index(path, database)
    try:
        save_index(index, kept)
    except DataError as error:
        _log.warning("the index is not kept: %s", error)
    return index


def save_index(index: Index, file: str | os.PathLike[str]) -> None:
    """Write an index such that it is there whole or not at all.

    Raises:
        DataError: it cannot be written.
    """
    require_instance("index", index, Index)
    target, files = Path(require_path("file", file)), Files()
    if target.is_dir():
        raise DataError(f"{target} is a folder; give the name of a file in it")
    arrays = {
        name: np.ascontiguousarray(getattr(index, name), dtype) for name, dtype in _ARRAYS.items()
    }
    draft = draft_of(target, str(os.getpid()))
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with files.create(draft) as writer:
            writer.write_at(0, _head(index, {name: digest(one) for name, one in arrays.items()}))
            for (start, _), one in zip(_places(len(index)).values(), arrays.values(), strict=True):
                if len(one):
                    writer.write_at(start, one)
            writer.resize(_total(len(index)))
            writer.sync()
        files.publish(draft, target)
    except OSError as error:
        with suppress(OSError):
            draft.unlink()
        raise DataError(f"{target}: the index cannot be written: {error}") from error


def load_index(
    file: str | os.PathLike[str],
    path: str | os.PathLike[str],
    database: str | bytes | None = None,
) -> Index:
    """Map a kept index, after checking it and comparing it with the database as it is now.

    Raises:
        DataError: it is missing, damaged, or of another database or another state of it.
    """
    kept = Path(require_path("file", file))
    name = database_name(database)
    with open_pages(path) as pages:
        now = pages.fingerprint
    raw = _map(kept)
    try:
        head = json.loads(unseal(bytes(raw[:_HEAD]).rstrip(b"\0"), "its head"))
        facts = _checked(head)
    except (SapwoodError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{kept}: not an index, or damaged: {error}; remove it") from error
    if facts["database"] != name or facts["fingerprint"] != now:
        raise DataError(
            f"{kept}: the index is of another state of {data_file(path)}: it is of transaction "
            f"{facts['fingerprint'].txnid}, and the database is at {now.txnid}; make it again"
        )
    arrays = _arrays(kept, raw, facts["count"], head)
    return _whole(
        Index(file=data_file(path), flags=facts["flags"], database=name, fingerprint=now, **arrays),
        kept,
    )


def _map(kept: Path) -> memoryview:
    try:
        with os.fdopen(open_regular(kept), "rb") as opened:
            if os.fstat(opened.fileno()).st_size <= _COPIED:
                return memoryview(opened.read())
            return memoryview(mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ))
    except (OSError, ValueError) as error:
        raise DataError(f"{kept}: the index cannot be read: {error}") from error


def _head(index: Index, digests: dict[str, str]) -> bytes:
    facts = {
        "kind": _MARK,
        "database": None if index.database is None else index.database.hex(),
        "flags": index.flags,
        "count": len(index),
        "fingerprint": asdict(index.fingerprint),
        "algorithm": DEFAULT_ALGORITHM,
        "digests": digests,
    }
    # A name of a database may have 511 bytes at most, so that this always fits.
    return seal(json.dumps(facts).encode()).ljust(_HEAD, b"\0")


def _checked(head: dict[str, Any]) -> dict[str, Any]:
    """What the head says, in our types."""
    if head["kind"] != _MARK:
        raise ValueError(f"expected the kind {_MARK!r}, found {head['kind']!r}")
    name = head["database"]
    return {
        "database": None if name is None else bytes.fromhex(name),
        "flags": int(head["flags"]),
        "count": int(head["count"]),
        "fingerprint": Fingerprint(**head["fingerprint"]),
    }


def _places(count: int) -> dict[str, tuple[int, int]]:
    """Where each array starts and ends."""
    places, at = {}, _HEAD
    for name, dtype in _ARRAYS.items():
        end = at + count * np.dtype(dtype).itemsize
        places[name] = (at, end)
        at = -(-end // 8) * 8
    return places


def _total(count: int) -> int:
    return max(end for _, end in _places(count).values())


def _arrays(kept: Path, raw: memoryview, count: int, head: dict[str, Any]) -> dict[str, Any]:
    if len(raw) != _total(count):
        raise DataError(
            f"{kept}: expected {_total(count)} bytes for {count} records, found {len(raw)}"
        )
    arrays = {}
    for name, (start, end) in _places(count).items():
        part = raw[start:end]
        try:
            same = matches(part, head["digests"][name], head["algorithm"])
        except (SapwoodError, KeyError, TypeError) as error:
            raise DataError(f"{kept}: the index cannot be checked: {error}") from error
        if not same:
            raise DataError(f"{kept}: the checksum of {name!r} does not match; remove it")
        arrays[name] = np.frombuffer(part, _ARRAYS[name])
    return arrays


def _whole(index: Index, kept: Path) -> Index:
    """No record may lie outside of the file, whoever wrote the index."""
    size = index.fingerprint.size
    for starts, sizes in (
        (index.offsets, index.lengths),
        (index.key_offsets, index.key_lengths),
    ):
        if len(starts) and (starts.min() < 0 or (starts > size - sizes.astype(np.int64)).any()):
            raise DataError(f"{kept}: a record of the index lies outside of the database")
    return index
