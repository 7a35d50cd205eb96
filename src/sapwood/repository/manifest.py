"""What a model version consists of, as bytes: a table of tensors, their names, and the structure.

Binary, because a model may have thousands of tensors and is opened often: numpy reads the table
without a loop. Everything is checked before it is used; a manifest may come from the network.
"""

from __future__ import annotations

import json
import math
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from sapwood.errors import BadName, Damaged
from sapwood.repository.names import check_file

__all__ = ["DTYPES", "Manifest", "TensorRow", "nbytes_of", "text_of"]

_MAGIC = b"SWMANIF1"
_WITH_FILES = b"SWMANIF2"
"""Of a manifest with files: versions that do not know of them refuse it, and lose none."""
_HEAD = struct.Struct("<8sIIIQQQ")  # magic, tensors, names, dimensions, name bytes, JSON, graph
_LIMIT = 2**31
DTYPES = (
    "bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64",
    "float16", "bfloat16", "float32", "float64", "complex32", "complex64", "complex128",
    "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu",
    "float4_e2m1fn_x2",
)  # fmt: skip
"""torch's names; their places are the codes in manifests, so that new ones come at the end."""
_SIZES = (1, 1, 1, 2, 2, 4, 4, 8, 8, 2, 2, 4, 8, 4, 8, 16, 1, 1, 1, 1, 1, 1)
_ITEMSIZE = dict(zip(DTYPES, _SIZES, strict=True))
_CODE = {name: code for code, name in enumerate(DTYPES)}


@dataclass(frozen=True, slots=True)
class TensorRow:
    """One tensor of a model."""

    number: int
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    blob: int
    """Which run of bytes holds it; what the number means is the repository's."""


@dataclass(frozen=True)
class Manifest:
    """The tensors of a model version, and how they belong together."""

    dtypes: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    blobs: tuple[int, ...]
    names: tuple[tuple[str, int], ...]
    """Every name with the number of its tensor, in the order of the value that was saved.

    A tensor without a name belongs to the version, and not to the value: whoever saved it knows it
    by its number, and it is kept and removed with the rest.
    """
    structure: Any
    graph: bytes = b""
    """The architecture graph, encoded; empty where there is none."""
    files: tuple[tuple[str, int], ...] = ()
    """Files kept beside the tensors, such as ``config.json``, with the number of the run of bytes
    that holds each: a tensor of uint8 without a name."""
    text: bytes = field(default=b"", compare=False, repr=False)
    """``text_of(structure)``, where somebody has made it already."""

    @cached_property
    def by_name(self) -> dict[str, int]:
        """Numbers of tensors by name."""
        return dict(self.names)

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Bytes of each tensor."""
        return tuple(nbytes_of(d, s) for d, s in zip(self.dtypes, self.shapes, strict=True))

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(self.sizes)

    def row(self, number: int) -> TensorRow:
        """All about one tensor."""
        return TensorRow(
            number,
            self.dtypes[number],
            self.shapes[number],
            self.sizes[number],
            self.blobs[number],
        )

    def encode(self) -> bytes:
        """As bytes, with a checksum of them behind."""
        names = "\0".join(name for name, _ in self.names).encode("utf-8", "surrogatepass")
        dims = [n for shape in self.shapes for n in shape]
        text = self.text or text_of(self.structure)
        if self.files:
            text = b"[%s,%s]" % (text, text_of(dict(self.files)))
        body = b"".join(
            (
                _HEAD.pack(
                    _WITH_FILES if self.files else _MAGIC,
                    len(self.dtypes),
                    len(self.names),
                    len(dims),
                    len(names),
                    len(text),
                    len(self.graph),
                ),
                np.array(self.blobs, "<i8").tobytes(),
                np.array(dims, "<i8").tobytes(),
                np.array([number for _, number in self.names], "<u4").tobytes(),
                np.array([_CODE[d] for d in self.dtypes], "u1").tobytes(),
                np.array([len(shape) for shape in self.shapes], "u1").tobytes(),
                names,
                text,
                self.graph,
            )
        )
        return body + struct.pack("<I", zlib.crc32(body))

    @classmethod
    def decode(cls, content: bytes | memoryview) -> Manifest:
        """The reverse of ``encode``.

        Raises:
            Damaged: it is truncated or was changed, or is no manifest.
        """
        data = memoryview(content).cast("B")
        if len(data) < _HEAD.size + 4:
            raise Damaged(f"a manifest of {len(data)} bytes is truncated")
        magic, tensors, names, dims, name_bytes, text, graph = _HEAD.unpack_from(data)
        if magic not in (_MAGIC, _WITH_FILES):
            raise Damaged("this is no manifest of a model, or one of a newer version of Sapwood")
        sizes = (8 * tensors, 8 * dims, 4 * names, tensors, tensors, name_bytes, text, graph)
        if _HEAD.size + sum(sizes) + 4 != len(data):
            raise Damaged("a manifest is truncated: its tables do not end where it does")
        (mark,) = struct.unpack_from("<I", data, len(data) - 4)
        if mark != zlib.crc32(data[:-4]):
            raise Damaged("a manifest is damaged: its own checksum does not match")
        sections, at = [], _HEAD.size
        for size in sizes:
            sections.append(data[at : at + size])
            at += size
        try:
            found = cls._of_sections(sections)
            return found._with_files() if magic == _WITH_FILES else found
        except Damaged:
            raise
        except (
            BadName,
            ValueError,
            TypeError,
            AttributeError,
            RecursionError,
            OverflowError,
        ) as error:
            raise Damaged(f"a manifest is damaged: {error}") from error

    @classmethod
    def _of_sections(cls, sections: Sequence[memoryview]) -> Manifest:
        blobs: npt.NDArray[np.int64] = np.frombuffer(sections[0], "<i8")
        dims: npt.NDArray[np.int64] = np.frombuffer(sections[1], "<i8")
        numbers: npt.NDArray[np.uint32] = np.frombuffer(sections[2], "<u4")
        codes: npt.NDArray[np.uint8] = np.frombuffer(sections[3], "u1")
        ranks: npt.NDArray[np.uint8] = np.frombuffer(sections[4], "u1")
        text = bytes(sections[5]).decode("utf-8", "surrogatepass")
        names = text.split("\0") if len(numbers) else []
        if len(names) != len(numbers) or len(set(names)) != len(names):
            raise Damaged("a manifest is damaged: its names are not unique")
        if len(numbers) and numbers.max() >= len(codes):
            raise Damaged("a manifest is damaged: a name belongs to no tensor")
        if len(codes) and codes.max() >= len(DTYPES):
            raise Damaged("a manifest has a dtype that this version does not know")
        if int(ranks.sum()) != len(dims) or (len(dims) and dims.min() < 0):
            raise Damaged("a manifest is damaged: its shapes are not shapes")
        flat, shapes, at = dims.tolist(), [], 0
        for rank in ranks.tolist():
            shapes.append(tuple(flat[at : at + rank]))
            at += rank
        return cls(
            tuple(DTYPES[code] for code in codes.tolist()),
            tuple(shapes),
            tuple(blobs.tolist()),
            tuple(zip(names, numbers.tolist(), strict=True)),
            json.loads(bytes(sections[6])),
            bytes(sections[7]),
        )

    def _with_files(self) -> Manifest:
        """This one, whose structure has files beside the value's own structure."""
        structure, files = self.structure
        named = {number for _, number in self.names}
        for name, number in files.items():
            check_file(name)
            if type(number) is not int or not 0 <= number < len(self.dtypes) or number in named:
                raise Damaged("a manifest is damaged: a file of it has no bytes of its own")
            if self.dtypes[number] != "uint8" or len(self.shapes[number]) != 1:
                raise Damaged("a manifest is damaged: a file of it is no run of bytes")
        return replace(self, structure=structure, files=tuple(files.items()))


def text_of(structure: Any) -> bytes:
    """A structure as manifests hold it."""
    return json.dumps(structure, separators=(",", ":")).encode()


def nbytes_of(dtype: str, shape: Sequence[int]) -> int:
    """Size of a tensor."""
    return math.prod(shape) * _ITEMSIZE[dtype]
