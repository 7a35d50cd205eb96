"""A version as a folder of files, made while they are read: none of them is ever in memory.

A ``.safetensors`` file is made as the format's own writer would: the same tensors give the same
bytes, whichever range of them is asked for.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Protocol

from sapwood.errors import BadName, Damaged, StoreError
from sapwood.repository.manifest import TensorRow
from sapwood.repository.names import check_file
from sapwood.state.safetensors import MODEL_NAMES, make_header
from sapwood.store.exchange.folder import INDEX, weight_map
from sapwood.store.kept import WEIGHTS
from sapwood.store.stored import StoredModel

__all__ = ["OutFile", "SafeFile", "as_folder", "whole_file"]

_CODES = {name: code for code, name in MODEL_NAMES.items()}
_PLACE = {name: place for place, name in enumerate(MODEL_NAMES.values())}
_FOUR_BITS = MODEL_NAMES["F4"]
_MOST_HEADER = 100 * 10**6
"""Readers of the format refuse a longer one."""


class OutFile(Protocol):
    """A file that is given out."""

    @property
    def size(self) -> int:
        """Bytes of it."""
        ...

    @property
    def mark(self) -> str:
        """Forty hexadecimal digits, equal only for equal bytes."""
        ...

    def blocks(self, start: int, stop: int) -> Iterator[memoryview]:
        """The bytes of a range; each block is overwritten by the next."""
        ...


class SafeFile:
    """Some tensors of a version as a ``.safetensors`` file. Nothing is read before it is asked for.

    Tied tensors are in it under each of their names, as readers expect, unless the metadata of the
    file they came from says that one name stands for the other.
    """

    def __init__(self, stored: StoredModel, names: Collection[str]) -> None:
        """Make its header.

        Raises:
            StoreError: the format cannot hold these tensors.
        """
        self._stored = stored
        metadata = _metadata(stored)
        numbers = {name: n for name, n in stored.manifest.names if name in set(names)}
        rows = {
            name: stored.manifest.row(number)
            for name, number in numbers.items()
            if numbers.get(metadata.get(name, ""), -1) != number
        }
        _check(str(stored.record.reference), rows)
        order = sorted(rows.items(), key=lambda one: (_PLACE[one[1].dtype], one[0].encode()))
        self._rows = [row for _, row in order]
        self._header = make_header(
            ((name, _CODES[row.dtype], _file_shape(row)) for name, row in order), metadata
        )
        if len(self._header) > _MOST_HEADER:
            raise StoreError(
                f"{stored.record.reference} has so many tensors that no reader would take the "
                "header of one file; write it as a folder with several (--shard-size)"
            )
        self.payload = sum(row.nbytes for row in self._rows)
        self.size = len(self._header) + self.payload
        self.mark = _mark(stored, self._header, *self._rows)
        self.names = tuple(name for name, _ in order)

    def blocks(self, start: int, stop: int) -> Iterator[memoryview]:
        """The bytes of a range; each block is overwritten by the next."""
        length = len(self._header)
        if start < length:
            yield memoryview(self._header)[start : min(stop, length)]
        if stop > length:
            yield from self._stored.parts(self._rows, max(start, length) - length, stop - length)


class KeptFile:
    """A file that was kept with a version."""

    def __init__(self, stored: StoredModel, name: str) -> None:
        """``name`` is one of ``stored.files``."""
        self._stored, self._row = stored, stored.file_row(name)
        self.size = self._row.nbytes
        self.mark = _mark(stored, name.encode(), self._row)

    def blocks(self, start: int, stop: int) -> Iterator[memoryview]:
        """The bytes of a range; each block is overwritten by the next."""
        return self._stored.parts([self._row], start, stop)


class _TextFile:
    """A file that is made here."""

    def __init__(self, content: bytes) -> None:
        self._content = content
        self.size = len(content)
        self.mark = hashlib.blake2b(content, digest_size=20).hexdigest()

    def blocks(self, start: int, stop: int) -> Iterator[memoryview]:
        yield memoryview(self._content)[start:stop]


def whole_file(stored: StoredModel) -> SafeFile:
    """All tensors of a version in one file.

    Raises:
        StoreError: the format cannot hold them.
    """
    return SafeFile(stored, list(stored))


def as_folder(stored: StoredModel, *, shard_bytes: int | None = None) -> dict[str, OutFile]:
    """The files of a version: those kept with it, and its weights, called and split as they came.

    Args:
        stored: the version.
        shard_bytes: split the weights anew, into files of at most so many bytes.

    Raises:
        StoreError: the format cannot hold its tensors, or two files have one name.
    """
    weights = _weights_name(stored)
    kept = {name: KeptFile(stored, name) for name in stored.files}
    shards = _split(stored, weights, shard_bytes) if shard_bytes else _shards(stored, weights)
    made: dict[str, OutFile] = {name: SafeFile(stored, held) for name, held in shards.items()}
    if shard_bytes:
        kept.pop(f"{weights}{INDEX}", None)  # of another way to split them
        if len(made) > 1:
            made[f"{weights}{INDEX}"] = _index(made)
    doubled = kept.keys() & made.keys()
    if doubled:
        raise StoreError(
            f"{stored.record.reference} keeps a file {min(doubled)}, which is also what a part of "
            "its weights is called; save it without that file"
        )
    return {**kept, **made}


def _shards(stored: StoredModel, weights: str) -> Mapping[str, Collection[str]]:
    """Which tensors go into which file, as the index that was kept says; into one without it."""
    whole = {weights: list(stored)}
    index = f"{weights}{INDEX}"
    if index not in stored.files:
        return whole
    try:
        places = weight_map(stored.file(index), index)
    except Damaged:
        return whole  # some file of the user's, which is not what its name says
    if not places or not set(places) <= set(stored) or not all(map(_sound, places.values())):
        return whole
    last = max(places.values())
    shards: dict[str, list[str]] = {}
    for name in stored:  # what the index leaves out was in one of its files
        shards.setdefault(places.get(name, last), []).append(name)
    return shards


def _split(stored: StoredModel, weights: str, most: int) -> Mapping[str, Collection[str]]:
    groups: list[list[str]] = [[]]
    filled = 0
    for name, number in stored.manifest.names:
        size = stored.manifest.sizes[number]
        if groups[-1] and filled + size > most:
            groups.append([])
            filled = 0
        groups[-1].append(name)
        filled += size
    if len(groups) == 1:
        return {weights: groups[0]}
    stem, count = weights.removesuffix(".safetensors"), len(groups)
    return {
        f"{stem}-{number:05d}-of-{count:05d}.safetensors": names
        for number, names in enumerate(groups, 1)
    }


def _index(files: Mapping[str, OutFile]) -> OutFile:
    shards = {name: file for name, file in files.items() if isinstance(file, SafeFile)}
    places = {held: name for name, file in shards.items() for held in file.names}
    total = sum(file.payload for file in shards.values())
    text = {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
    return _TextFile((json.dumps(text, indent=2) + "\n").encode())


def _weights_name(stored: StoredModel) -> str:
    """What the weights were called; a note is the user's, and may say anything."""
    name = stored.record.note.get("weights", WEIGHTS)
    return name if isinstance(name, str) and _sound(name) else WEIGHTS


def _sound(name: str) -> bool:
    """Whether weights can be called so, in one folder with the other files."""
    try:
        return "/" not in check_file(name) and name.endswith(".safetensors")
    except BadName:
        return False


def _metadata(stored: StoredModel) -> dict[str, str]:
    found = stored.record.note.get("metadata")
    if not isinstance(found, Mapping):
        return {}
    return {k: v for k, v in found.items() if isinstance(k, str) and isinstance(v, str)}


def _check(what: str, rows: Mapping[str, TensorRow]) -> None:
    unknown = sorted({row.dtype for row in rows.values() if row.dtype not in _CODES})
    if unknown:
        raise StoreError(
            f"{what} has tensors of {', '.join(unknown)}, which safetensors files cannot hold; "
            "write a .pt file"
        )
    for name, row in rows.items():
        if name == "__metadata__" or any("\ud800" <= c <= "\udfff" for c in name):
            raise StoreError(f"{what}: no tensor of a safetensors file can be called {name!r}")
        if row.dtype == _FOUR_BITS and not row.shape:
            raise StoreError(f"{what}: {name} is a pair of F4 without a dimension to be in")


def _file_shape(row: TensorRow) -> Sequence[int]:
    """As the format counts: torch has two elements of four bits in one."""
    return (*row.shape[:-1], 2 * row.shape[-1]) if row.dtype == _FOUR_BITS else row.shape


def _mark(stored: StoredModel, more: bytes, *rows: TensorRow) -> str:
    """Versions never change, and their numbers are never given again."""
    found = hashlib.blake2b(digest_size=20)
    facts = stored.record.name, stored.record.id, stored.record.created, [row.blob for row in rows]
    found.update(repr(facts).encode())
    found.update(more)
    return found.hexdigest()
