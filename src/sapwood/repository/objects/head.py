"""One version as an object: its manifest, and for each tensor what it contains and where it lies.

A tensor is known by its strong digest; the place is where it lay when the version was saved, and a
hint ever since: gc may have moved it.
"""

from __future__ import annotations

import base64
import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from sapwood.errors import BadKey, Damaged
from sapwood.repository.base import NOTHING
from sapwood.repository.manifest import Manifest
from sapwood.repository.merging import mark_of
from sapwood.repository.objects.layout import frame, unframe
from sapwood.storage.keys import checked_key

__all__ = ["BlobRow", "Head", "decode_layers", "encode_layers"]

_KIND, _LAYERS_KIND = b"HD", b"LY"
_TABLE = struct.Struct("<IIQQQ16s")  # rows, packs, bytes of manifest, packs, configs; probe
_ROW = np.dtype(
    [
        ("pack", "<u4"),
        ("start", "<u8"),
        ("nbytes", "<u8"),
        ("digest", "u1", (32,)),
        ("mark", "u1", (16,)),
    ]
)
_PROBE = mark_of(b"")
"""Tells which fast checksum this process has: xxhash is optional."""


@dataclass(frozen=True, slots=True)
class BlobRow:
    """A run of bytes: what it is, and where it lay when it was written."""

    pack: str
    start: int
    nbytes: int
    digest: bytes
    mark: bytes
    """A fast checksum; empty where it was made in a way that this process has not."""


@dataclass(frozen=True, kw_only=True)
class Head:
    """What the object of a version holds."""

    manifest: Manifest
    """Its blobs are indices of rows, or ``NOTHING``."""
    rows: Sequence[BlobRow]
    configs: Mapping[bytes, bytes] = field(default_factory=dict)

    def encode(self) -> bytes:
        """As bytes, with a checksum."""
        packs = list(dict.fromkeys(row.pack for row in self.rows))
        number = {pack: n for n, pack in enumerate(packs)}
        table = np.zeros(len(self.rows), _ROW)
        for at, row in enumerate(self.rows):
            table[at] = (
                number[row.pack],
                row.start,
                row.nbytes,
                np.frombuffer(row.digest, np.uint8),
                np.frombuffer(row.mark, np.uint8),
            )
        manifest, names = self.manifest.encode(), "\n".join(packs).encode()
        configs = json.dumps(
            {k.hex(): base64.b64encode(v).decode() for k, v in self.configs.items()}
        ).encode()
        sizes = (len(manifest), len(names), len(configs))
        head = _TABLE.pack(len(self.rows), len(packs), *sizes, _PROBE)
        return frame(_KIND, b"".join((head, manifest, names, configs, table.tobytes())))

    @classmethod
    def decode(cls, content: bytes, key: str) -> Head:
        """The reverse.

        Raises:
            Damaged: it is truncated, was changed, or contradicts itself; names the key.
        """
        body = unframe(_KIND, content, key)
        if len(body) < _TABLE.size:
            raise Damaged(f"{key} is damaged: it has no table")
        rows, packs, *sizes, probe = _TABLE.unpack_from(body)
        if _TABLE.size + sum(sizes) + rows * _ROW.itemsize != len(body):
            raise Damaged(f"{key} is damaged: its tables do not end where it does")
        at, parts = _TABLE.size, []
        for size in sizes:
            parts.append(body[at : at + size])
            at += size
        try:
            names = bytes(parts[1]).decode().split("\n") if packs else []
            found = cls(
                manifest=Manifest.decode(parts[0]),
                rows=_rows(np.frombuffer(body[at:], _ROW), names, probe == _PROBE),
                configs={
                    bytes.fromhex(k): base64.b64decode(v, validate=True)
                    for k, v in json.loads(bytes(parts[2])).items()
                },
            )
        except (ValueError, IndexError, AttributeError, TypeError, BadKey) as error:
            raise Damaged(f"{key} is damaged: {error}") from error
        found._check(key)
        return found

    def _check(self, key: str) -> None:
        sizes = self.manifest.sizes
        for number, blob in enumerate(self.manifest.blobs):
            if blob == NOTHING and not sizes[number]:
                continue
            if not 0 <= blob < len(self.rows) or self.rows[blob].nbytes != sizes[number]:
                raise Damaged(f"{key} is damaged: tensor {number} and its bytes do not fit")


def _rows(table: npt.NDArray[np.void], packs: Sequence[str], marked: bool) -> list[BlobRow]:
    for pack in packs:
        checked_key(pack)
    digests, marks = table["digest"].tobytes(), table["mark"].tobytes()
    columns = (table["pack"].tolist(), table["start"].tolist(), table["nbytes"].tolist())
    return [
        BlobRow(
            packs[pack],
            start,
            nbytes,
            digests[32 * n : 32 * n + 32],
            marks[16 * n : 16 * n + 16] if marked else b"",
        )
        for n, (pack, start, nbytes) in enumerate(zip(*columns, strict=True))
    ]


def encode_layers(layers: Mapping[bytes, int]) -> bytes:
    """The bytes of each layer's tensors by the layer's id, as an object."""
    text = json.dumps({id.hex(): nbytes for id, nbytes in layers.items()}, separators=(",", ":"))
    return frame(_LAYERS_KIND, text.encode())


def decode_layers(content: bytes, key: str) -> dict[bytes, int]:
    """The reverse.

    Raises:
        Damaged: it is not what was written; names the key.
    """
    body = unframe(_LAYERS_KIND, content, key)
    try:
        return {bytes.fromhex(k): int(v) for k, v in json.loads(bytes(body)).items()}
    except (ValueError, AttributeError, TypeError) as error:
        raise Damaged(f"{key} is damaged: {error}") from error
