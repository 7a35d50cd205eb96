"""What providers and their clients say to each other, as bytes.

A request is a short JSON message that says what is wanted, and how many bytes of *body* follow it.
A body is a list of byte strings, each with its length: keys, manifests, digests, tables of ranges.
Tensors come after that, as they are. Everything is checked here before it is used.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, fields
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from sapwood import errors
from sapwood.channel.connection import ChannelError, Connection
from sapwood.errors import SapwoodError, StoreError
from sapwood.repository.base import Kin, ModelRecord, NewModel
from sapwood.repository.manifest import Manifest
from sapwood.repository.names import Reference
from sapwood.repository.providers.base import Head, StaleMembers, VersionKey
from sapwood.repository.providers.local import members_of_json, members_to_json

__all__ = [
    "ANSWER_LIMIT",
    "BODY_LIMIT",
    "PROTOCOL",
    "RANGE",
    "error_of",
    "error_to_json",
    "head_of",
    "head_to_body",
    "join",
    "kin_of",
    "made",
    "number",
    "numbers_of",
    "plain",
    "receive_body",
    "record_of",
    "reference_of",
    "send",
    "split",
    "table",
    "table_rows",
    "text",
    "version_of",
    "version_to_json",
]

PROTOCOL = "sapwood-provider/1"
BODY_LIMIT = 256 * 2**20
"""Bytes of a request's body: manifests and keys of some millions of tensors."""
ANSWER_LIMIT = 2**30
"""Bytes of an answer's message or body: lists of everything a provider has."""
_COUNT = struct.Struct("<I")
_STEP = 4 * 2**20
_MOST_BYTES = 2**60
RANGE = np.dtype([("key", "S24"), ("start", "<u8"), ("nbytes", "<u8")])
"""A row of a table of ranges; keys are compared as 24 bytes, see ``table_keys``."""
T = TypeVar("T")


# -- bodies --------------------------------------------------------------------------------------


def join(parts: Sequence[Any]) -> bytes:
    """Byte strings as one body."""
    lengths = np.array([len(part) for part in parts], "<u4").tobytes()
    return b"".join([_COUNT.pack(len(parts)), lengths, *parts])


def split(body: bytes | bytearray) -> list[bytes]:
    """The reverse.

    Raises:
        StoreError: it is not such a body.
    """
    data = memoryview(body)
    if len(data) < _COUNT.size:
        raise StoreError("a body is truncated")
    (count,) = _COUNT.unpack_from(data)
    begin = _COUNT.size + 4 * count
    if begin > len(data):
        raise StoreError("a body is truncated")
    ends = np.frombuffer(data, "<u4", count, _COUNT.size).astype(np.int64).cumsum() + begin
    if (int(ends[-1]) if count else begin) != len(data):
        raise StoreError("a body is not as long as its parts")
    starts = [begin, *ends[:-1].tolist()]
    return [bytes(data[a:b]) for a, b in zip(starts, ends.tolist(), strict=False)]


def send(
    connection: Connection, message: Mapping[str, Any], body: bytes = b"", fds: Sequence[int] = ()
) -> None:
    """Send a message and its body."""
    connection.send({**message, "body": len(body)} if body else message, fds)
    if body:
        connection.send_bytes(body)


def receive_body(connection: Connection, message: Mapping[str, Any], limit: int) -> list[bytes]:
    """The body that a message announces; memory is taken as its bytes come.

    Raises:
        ChannelError: it is too long.
        StoreError: it is not well formed.
    """
    nbytes = message.get("body", 0)
    if not isinstance(nbytes, int) or not 0 <= nbytes <= limit:
        raise ChannelError(f"a body of {nbytes!r} bytes was announced, at most {limit} are taken")
    body = bytearray()
    while len(body) < nbytes:
        block = bytearray(min(_STEP, nbytes - len(body)))
        connection.receive_into(block)
        body += block
    return split(body) if nbytes else []


def numbers_of(data: bytes, dtype: str = "<u4") -> npt.NDArray[Any]:
    """A table of numbers.

    Raises:
        StoreError: it is none.
    """
    if len(data) % np.dtype(dtype).itemsize:
        raise StoreError("a table is truncated")
    return np.frombuffer(data, dtype)


# -- what messages hold --------------------------------------------------------------------------


def number(message: Mapping[str, Any], name: str, low: int = 0, high: int = 2**63 - 1) -> int:
    """A whole number of a message.

    Raises:
        StoreError: it is none, or too small or large.
    """
    value = message.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise StoreError(f"{name} is {value!r}, expected a number from {low} to {high}"[:200])
    return value


def text(message: Mapping[str, Any], name: str) -> str:
    """A text of a message.

    Raises:
        StoreError: it is none.
    """
    value = message.get(name)
    if not isinstance(value, str):
        raise StoreError(f"{name} is {value!r}, expected a text"[:200])
    return value


def version_to_json(version: VersionKey) -> list[Any]:
    """Name, version and number."""
    return [version.name, version.version, version.id]


def version_of(value: Any) -> VersionKey:
    """The reverse.

    Raises:
        StoreError: it is none; see ``local.check_version_key`` for what is in it.
    """
    match value:
        case [str(name), str(version), int(id)] if not isinstance(id, bool) and 0 < id < 2**63:
            return VersionKey(name, version, id)
    raise StoreError(f"{value!r} is no version"[:200])


def reference_of(message: Mapping[str, Any]) -> Reference:
    """What ``name`` and ``version`` of a message refer to."""
    version = None if message.get("version") is None else text(message, "version")
    return Reference(text(message, "name"), version)


def plain(value: Any) -> dict[str, Any]:
    """A record, or another flat dataclass, as JSON."""
    return asdict(value)


def record_of(value: Mapping[str, Any]) -> ModelRecord:
    """The reverse, for records."""
    return made(ModelRecord, {**value, "tags": tuple(value["tags"])})


def kin_of(value: Mapping[str, Any]) -> Kin:
    """The same, for versions with common layers."""
    return made(Kin, {**value, "record": record_of(value["record"])})


def made(kind: Callable[..., T], value: Mapping[str, Any]) -> T:
    """A flat dataclass from JSON."""
    names = {field.name for field in fields(kind)}  # type: ignore[arg-type]
    return kind(**{name: one for name, one in value.items() if name in names})


# -- heads ---------------------------------------------------------------------------------------


def head_to_body(head: Head) -> bytes:
    """A head as a body."""
    model = head.model
    about = {
        "name": model.name,
        "version": model.version,
        "id": model.id,
        "parent": model.parent,
        "parent_name": model.parent_name,
        "tags": list(model.tags),
        "metrics": dict(model.metrics),
        "note": dict(model.note),
        "layer_bytes": list(model.layers.values()),
    }
    return join(
        [
            json.dumps(about).encode(),
            model.manifest.encode(),
            join(head.keys),
            join(list(model.layers)),
            join([part for pair in model.configs.items() for part in pair]),
        ]
    )


def head_of(body: Sequence[bytes]) -> Head:
    """The reverse.

    Raises:
        StoreError: it is not well formed.
        Damaged: its manifest is not.
    """
    if len(body) != 5:
        raise StoreError("a head has five parts")
    about = _json(body[0])
    layers, configs = split(body[3]), split(body[4])
    sizes = about.get("layer_bytes")
    if not isinstance(sizes, list) or len(sizes) != len(layers) or not all(map(_is_size, sizes)):
        raise StoreError("a head has one size for each layer")
    version = version_of([about.get("name"), about.get("version"), about.get("id")])
    parent, parent_name = about.get("parent"), about.get("parent_name")
    if (parent is None) != (parent_name is None) or (
        parent is not None and (not _is_size(parent) or not isinstance(parent_name, str))
    ):
        raise StoreError("a parent has a number and a name")
    tags, metrics, note = about.get("tags"), about.get("metrics"), about.get("note")
    if not isinstance(tags, list) or not all(isinstance(tag, str) for tag in tags):
        raise StoreError("tags are texts")
    if not isinstance(metrics, dict) or not all(map(_is_real, metrics.values())):
        raise StoreError("metrics are numbers")
    if sum(sizes) >= _MOST_BYTES:
        raise StoreError("layers have more bytes than any model")
    if not isinstance(note, dict):
        raise StoreError("a note is a JSON object")
    manifest = Manifest.decode(body[1])
    if manifest.nbytes >= _MOST_BYTES:
        raise StoreError("a manifest has more bytes than any model")
    model = NewModel(
        name=version.name,
        version=version.version,
        id=version.id,
        manifest=manifest,
        parent=parent,
        parent_name=parent_name,
        tags=tags,
        metrics=metrics,
        note=note,
        layers=dict(zip(layers, sizes, strict=True)),
        configs=dict(zip(configs[::2], configs[1::2], strict=False)),
    )
    return Head(model=model, keys=tuple(split(body[2])))


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63


def _is_real(value: Any) -> bool:
    if isinstance(value, float):
        return value == value  # not a NaN, which no catalog can hold
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**63


def _json(data: bytes) -> dict[str, Any]:
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        raise StoreError("a part of a body is not JSON") from None
    if not isinstance(value, dict):
        raise StoreError("a part of a body is not a JSON object")
    return value


# -- errors --------------------------------------------------------------------------------------

_KNOWN: Mapping[str, type[SapwoodError]] = {
    name: kind
    for name in errors.__all__
    if issubclass(kind := getattr(errors, name), SapwoodError)
    and kind not in (errors.PeerFailed, errors.RankError)
}


def error_to_json(error: SapwoodError) -> dict[str, Any]:
    """An error as an answer."""
    if isinstance(error, StaleMembers):
        members = members_to_json(error.members)
        return {"error": "StaleMembers", "text": str(error), "members": members}
    kind = next(one.__name__ for one in type(error).__mro__ if one.__name__ in _KNOWN)
    return {"error": kind, "text": str(error)}


def error_of(message: Mapping[str, Any]) -> SapwoodError:
    """The reverse."""
    said, kind = str(message.get("text")), str(message.get("error"))
    if kind == "StaleMembers":
        return StaleMembers(said, members_of_json(str(message.get("members"))))
    return _KNOWN.get(kind, StoreError)(said)


def table(ranges: Iterable[tuple[bytes, int, int]]) -> bytes:
    """Ranges of tensors as a table: key, start, size of each."""
    return np.array(list(ranges), RANGE).tobytes()


def table_rows(data: bytes) -> list[tuple[bytes, int, int]]:
    """The reverse.

    Raises:
        StoreError: it is none.
    """
    found = numbers_of(data, RANGE)  # type: ignore[arg-type]
    # numpy drops zeros at the end of byte strings.
    keys = [data[at : at + 24] for at in range(0, len(data), RANGE.itemsize)]
    starts, sizes = found["start"].tolist(), found["nbytes"].tolist()
    return list(zip(keys, starts, sizes, strict=True))
