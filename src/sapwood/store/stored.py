"""One stored model, opened: its tensors can be looked at, and read whole or in part."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from sapwood.errors import ModelNotFound
from sapwood.repository.base import NOTHING, Backend, BlobPart, ModelRecord
from sapwood.repository.manifest import Manifest, TensorRow
from sapwood.repository.names import nearest
from sapwood.store.raw import bytes_of, empty
from sapwood.store.tree import put_together

__all__ = ["StoredModel", "StoredTensor"]

_BLOCK = 4 * 2**20


class StoredModel(Mapping[str, "StoredTensor"]):
    """A model version, as a mapping of its tensors. Nothing is read before it is asked for."""

    def __init__(self, backend: Backend, record: ModelRecord, manifest: Manifest) -> None:
        """Made by ``Repository.open``."""
        self.record = record
        self.manifest = manifest
        self._backend = backend

    def __getitem__(self, name: str) -> StoredTensor:
        """One tensor.

        Raises:
            ModelNotFound: there is none of that name; says what is like it.
        """
        number = self.manifest.by_name.get(name)
        if number is None:
            like = nearest(name, self.manifest.by_name)
            raise ModelNotFound(f"{self.record.reference} has no tensor {name!r}{like}")
        return StoredTensor(self._backend, name, self.manifest.row(number))

    def row(self, name: str) -> TensorRow | None:
        """What is known of a tensor; None if there is none of that name."""
        number = self.manifest.by_name.get(name)
        return None if number is None else self.manifest.row(number)

    def value(self) -> Any:
        """The whole value that was saved, in memory of its own."""
        # Tensors without a name belong to the version, and not to the value: see ``Manifest``.
        rows = [self.manifest.row(number) for number in {n for _, n in self.manifest.names}]
        tensors = {row.number: empty(row) for row in rows}
        self._backend.read(
            [
                BlobPart(row.blob, 0, bytes_of(tensors[row.number]))
                for row in rows
                if row.blob != NOTHING
            ]
        )
        return put_together(self.manifest.structure, tensors.__getitem__)

    @property
    def files(self) -> Mapping[str, int]:
        """The files kept with it, such as ``config.json``; see ``file``."""
        return dict(self.manifest.files)

    def file(self, name: str) -> bytes:
        """The content of a file that was kept with it.

        Raises:
            ModelNotFound: there is none of that name; says what is like it.
        """
        return b"".join(map(bytes, self.parts([self.file_row(name)])))

    def file_row(self, name: str) -> TensorRow:
        """Where a kept file's bytes are, and how many.

        Raises:
            ModelNotFound: there is none of that name; says what is like it.
        """
        files = self.files
        if name not in files:
            like = nearest(name, files)
            raise ModelNotFound(f"{self.record.reference} has no file {name!r}{like}")
        return self.manifest.row(files[name])

    def blocks(self, row: TensorRow) -> Iterator[memoryview]:
        """A tensor's bytes, some at a time; each block is overwritten by the next."""
        return self.parts([row])

    def parts(
        self, rows: Sequence[TensorRow], start: int = 0, stop: int | None = None
    ) -> Iterator[memoryview]:
        """The bytes from ``start`` to ``stop`` of tensors that lie one after the other.

        Many small tensors are read at once. Each block is overwritten by the next.
        """
        end = sum(row.nbytes for row in rows) if stop is None else stop
        memory = memoryview(bytearray(max(0, min(end - start, _BLOCK))))
        wanted: list[BlobPart] = []
        filled = 0
        for blob, low, high in _spans(rows, start, end):
            while low < high:
                size = min(high - low, len(memory) - filled)
                wanted.append(BlobPart(blob, low, memory[filled : filled + size]))
                low, filled = low + size, filled + size
                if filled == len(memory):
                    self._backend.read(wanted)
                    yield memory
                    wanted, filled = [], 0
        if filled:
            self._backend.read(wanted)
            yield memory[:filled]

    def __contains__(self, name: object) -> bool:
        """Whether there is a tensor of that name."""
        return name in self.manifest.by_name

    def __iter__(self) -> Iterator[str]:
        """Names, in the order of the value that was saved."""
        return (name for name, _ in self.manifest.names)

    def __len__(self) -> int:
        """How many names there are."""
        return len(self.manifest.names)

    def __repr__(self) -> str:
        """What it is and how large."""
        return f"<{self.record.reference}: {len(self)} tensors, {self.manifest.nbytes} bytes>"


class StoredTensor:
    """One tensor of a stored model. Indexing reads no more rows than it needs."""

    def __init__(self, backend: Backend, name: str, row: TensorRow) -> None:
        """Made by ``StoredModel``."""
        self._backend, self._row = backend, row
        self.name = name
        self.shape = torch.Size(row.shape)
        self.dtype: torch.dtype = getattr(torch, row.dtype)
        self.nbytes = row.nbytes

    def load(self) -> Tensor:
        """All of it, in memory of its own."""
        out = empty(self._row)
        if self._row.blob != NOTHING:
            self._read(0, out)
        return out

    def __getitem__(self, index: Any) -> Tensor:
        """A part of it, as of a tensor."""
        rows = self._rows(index[0] if isinstance(index, tuple) and index else index)
        if rows is None or self._row.blob == NOTHING:
            return self.load()[index]
        first, count = rows
        size = self._row.nbytes // self._row.shape[0]
        part = TensorRow(0, self._row.dtype, (count, *self._row.shape[1:]), size * count, 0)
        out = empty(part)
        if count:
            self._read(first * size, out)
        return out[_rest(index)]

    def __len__(self) -> int:
        """Length of the first dimension."""
        if not self.shape:
            raise TypeError(f"{self.name} has no dimensions")
        return self.shape[0]

    def __repr__(self) -> str:
        """Name, shape and dtype."""
        return f"<{self.name}: {list(self.shape)} {self._row.dtype}>"

    def _rows(self, index: Any) -> tuple[int, int] | None:
        """First row and number of rows that an index needs; None if that is not so simple."""
        if not self._row.shape or not self._row.shape[0]:
            return None
        length = self._row.shape[0]
        if isinstance(index, int) and not isinstance(index, bool) and -length <= index < length:
            return index % length, 1
        if isinstance(index, slice):
            rows = range(*index.indices(length))
            return (min(rows), max(rows) - min(rows) + 1) if rows else (0, 0)
        return None

    def _read(self, start: int, out: Tensor) -> None:
        self._backend.read([BlobPart(self._row.blob, start, bytes_of(out))])


def _spans(rows: Sequence[TensorRow], start: int, stop: int) -> Iterator[tuple[int, int, int]]:
    """The blob of each tensor that has bytes in a range, and which of its bytes these are."""
    at = 0
    for row in rows:
        low, high = max(start - at, 0), min(stop - at, row.nbytes)
        if low < high:
            yield row.blob, low, high
        at += row.nbytes


def _rest(index: Any) -> Any:
    """What is left of an index when only the rows it needs were read."""
    if isinstance(index, tuple):
        return (_rest(index[0]), *index[1:])
    return slice(None, None, index.step) if isinstance(index, slice) else 0
