"""A folder of images, or of other files: each file is a record, each folder in it a class."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sapwood.data.write.base import LABELS, MAIN, NAMES, Kind, Sample
from sapwood.errors import ConfigError, DataError
from sapwood.regular import read_regular

__all__ = ["IMAGES", "Folder"]

IMAGES = (
    ".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm", ".jxl",
)  # fmt: skip


class Folder:
    """Files as they are; nothing is decoded.

    If the files are in folders, the first level of these are the classes, numbered in the order of
    their names, as everybody does.
    """

    kind: Kind = "folder"

    def __init__(self, root: Path, *, suffixes: Sequence[str], shuffle: int | None) -> None:
        """Look at all names.

        Raises:
            ConfigError: the files are not laid out as expected.
            DataError: a folder cannot be read.
        """
        self._root = root
        wanted = tuple(os.fsencode(one.lower()) for one in suffixes)
        found = sorted(_walk(os.fsencode(root), b"", wanted, ()))
        if not found:
            some = ", ".join(suffixes)
            raise ConfigError(f"{root}: no files with {some} in it; --suffix takes other ones")
        self._names = [name for name, _ in found]
        self.nbytes = sum(size for _, size in found)
        self._classes = _classes(root, self._names)
        if shuffle is not None:
            order = np.random.default_rng(shuffle).permutation(len(self._names))
            self._names = [self._names[n] for n in order.tolist()]
        labelled = (LABELS,) if self._classes else ()
        self.databases: tuple[str, ...] = (NAMES, *labelled, MAIN)
        self.facts: dict[str, Any] = {"columns": {MAIN: {}}, "shuffle": shuffle}
        if self._classes:
            self.facts["classes"] = [os.fsdecode(name) for name in self._classes]

    def samples(self) -> Iterator[Sample]:
        """File after file."""
        numbers = {name: struct.pack("<q", n) for n, name in enumerate(self._classes)}
        for name in self._names:
            data = self._read(name)
            label = (numbers[name.partition(b"/")[0]],) if numbers else ()
            yield Sample((name, *label, data), len(data))

    def _read(self, name: bytes) -> bytes:
        path = self._root / os.fsdecode(name)
        try:
            return read_regular(path)
        except OSError as error:
            raise DataError(f"{path}: cannot be read: {error.strerror or error}") from error


def _walk(
    folder: bytes, below: bytes, suffixes: tuple[bytes, ...], above: tuple[tuple[int, int], ...]
) -> Iterator[tuple[bytes, int]]:
    """Names and sizes of all files that end so, in no order; links are followed."""
    try:
        facts = Path(os.fsdecode(folder)).stat()
        here = (facts.st_dev, facts.st_ino)
        if here in above:
            raise DataError(
                f"{os.fsdecode(folder)}: a link leads back to a folder above; remove it"
            )
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.name.startswith(b"."):
                    continue
                name = below + entry.name
                if entry.is_dir():
                    yield from _walk(entry.path, name + b"/", suffixes, (*above, here))
                elif entry.name.lower().endswith(suffixes):
                    yield name, entry.stat().st_size
    except OSError as error:
        what = error.filename or folder
        raise DataError(f"{os.fsdecode(what)}: cannot be read: {error.strerror}") from error


def _classes(root: Path, names: Sequence[bytes]) -> list[bytes]:
    """The folders at the first level; an empty one would move the numbers of those behind it."""
    beside = [name for name in names if b"/" not in name]
    if len(beside) == len(names):
        return []
    if beside:
        raise ConfigError(
            f"{root}: {os.fsdecode(beside[0])} lies beside folders of classes; expected all files "
            "in folders, or none"
        )
    used = {name.partition(b"/")[0] for name in names}
    with os.scandir(os.fsencode(root)) as entries:
        every = {e.name for e in entries if e.is_dir() and not e.name.startswith(b".")}
    for name in sorted(every - used):
        raise ConfigError(
            f"{root / os.fsdecode(name)}: a class without files; remove the folder, or add files"
        )
    return sorted(used)
