"""Which kind of source a path is."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from sapwood.data.write import tar
from sapwood.data.write.arrays import read_npy, read_safetensors
from sapwood.data.write.base import KINDS, Kind, Source
from sapwood.data.write.folder import IMAGES, Folder
from sapwood.data.write.table import Column, Table, Whole
from sapwood.errors import ConfigError, DataError
from sapwood.regular import open_regular

__all__ = ["open_source"]

_ENDINGS: dict[Kind, tuple[str, ...]] = {
    "npy": (".npy",),
    "tar": tar.SUFFIXES,
    "safetensors": (".safetensors",),
}


def open_source(
    path: Path,
    *,
    kind: Kind | None,
    columns: Sequence[str] | None,
    suffixes: Sequence[str] | None,
    whole: bool,
    shuffle: int | None,
) -> Source:
    """Look at a file or folder, and make what reads its samples.

    Raises:
        ConfigError: the kind is unknown, or options do not go with it.
        DataError: it cannot be read, or is damaged.
    """
    if kind is not None and kind not in KINDS:
        raise ConfigError(f"kind={kind!r}: expected one of {', '.join(KINDS)}")
    if not path.exists():
        raise ConfigError(f"{path}: there is no such file or folder")
    kind = kind or _kind_of(path)
    _check_options(kind, columns=columns, suffixes=suffixes, whole=whole, shuffle=shuffle)
    if kind == "folder":
        if not path.is_dir():
            raise ConfigError(f"{path} is a file; kind 'folder' expects a folder of images")
        return Folder(path, suffixes=suffixes or IMAGES, shuffle=shuffle)
    files = _files(path, kind)
    for file in files:
        _check_regular(file)
    if kind == "tar":
        return tar.Tar(files, columns=columns)
    read = [(file, _read(file, kind, columns)) for file in files]
    if whole:
        return Whole(kind, read, shuffle=shuffle)
    return Table(kind, _same_name(read) if kind == "npy" else read, shuffle=shuffle)


def _kind_of(path: Path) -> Kind:
    if not path.is_dir():
        for kind, endings in _ENDINGS.items():
            if path.name.lower().endswith(endings):
                return kind
        known = ", ".join(one for endings in _ENDINGS.values() for one in endings)
        raise ConfigError(
            f"{path}: expected a folder of images, or a file that ends in {known}; "
            "--kind says what it is if its name does not"
        )
    found = [kind for kind in _ENDINGS if _files_in(path, kind)]
    if len(found) > 1:
        raise ConfigError(f"{path} holds {' and '.join(found)} files; say which with --kind")
    return found[0] if found else "folder"


def _files_in(folder: Path, kind: Kind) -> list[Path]:
    try:
        names = sorted(folder.iterdir())
    except OSError as error:
        raise DataError(f"{folder}: cannot be read: {error.strerror}") from error
    endings = _ENDINGS[kind]
    return [
        one for one in names if one.name.lower().endswith(endings) and not one.name.startswith(".")
    ]


def _files(path: Path, kind: Kind) -> list[Path]:
    if not path.is_dir():
        if kind == "tar" and not path.name.lower().endswith(tar.SUFFIXES):
            raise ConfigError(f"{path}: expected a name that ends in {', '.join(tar.SUFFIXES)}")
        return [path]
    found = _files_in(path, kind)
    if not found:
        raise ConfigError(f"{path}: no files in it that end in {', '.join(_ENDINGS[kind])}")
    return found


def _check_regular(file: Path) -> None:
    """Refuse a FIFO or a device: who opens one as a file waits for its other side."""
    try:
        os.close(open_regular(file))
    except OSError as error:
        raise DataError(f"{file}: cannot be read: {error.strerror or error}") from error


def _read(file: Path, kind: Kind, columns: Sequence[str] | None) -> list[Column]:
    found = read_npy(file) if kind == "npy" else read_safetensors(file, columns)
    if not found:
        raise ConfigError(f"{file}: no tensors in it")
    return found


def _same_name(read: list[tuple[Path, list[Column]]]) -> list[tuple[Path, list[Column]]]:
    """Parts of one array are files with different names."""
    return [
        (file, [Column(name="", data=one.data, dtype=one.dtype, shape=one.shape)])
        for file, (one,) in read
    ]


def _check_options(
    kind: Kind,
    *,
    columns: Sequence[str] | None,
    suffixes: Sequence[str] | None,
    whole: bool,
    shuffle: int | None,
) -> None:
    for option, given, good in (
        ("--column", columns is not None, ("tar", "safetensors")),
        ("--suffix", suffixes is not None, ("folder",)),
        ("--whole", whole, ("npy", "safetensors")),
        ("--shuffle", shuffle is not None, ("folder", "npy", "safetensors")),
    ):
        if given and kind not in good:
            raise ConfigError(f"{option} is for the kinds {', '.join(good)}; this is {kind}")
