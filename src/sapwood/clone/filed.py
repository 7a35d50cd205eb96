"""A fork through files: what everybody does today, here to be compared with.

Rank 0 writes the whole state as safetensors while the others wait for its next step; the clones
read it when it is synced.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from io import FileIO
from pathlib import Path

import numpy as np
import numpy.typing as npt
from torch import Tensor

from sapwood.clone.plan import Key
from sapwood.errors import CloneError
from sapwood.state.catalog import Catalog
from sapwood.state.contents import Contents, byte_view

__all__ = ["read_extras", "read_state", "remove_state", "write_extras", "write_state"]


def _home(folder: Path, session: str) -> Path:
    return folder / "clones" / session[:16]


def write_state(folder: Path, session: str, contents: Contents) -> Path:
    """Write all tensors below the run's folder; where they are.

    Raises:
        CloneError: they cannot be written.
    """
    home = _home(folder, session)
    try:
        home.mkdir(parents=True, exist_ok=True)
        for layout in contents.catalog.layouts.values():
            with (home / layout.filename).open("wb", buffering=0) as file:
                file.write(layout.header)
                for entry in layout.entries:
                    view = byte_view(contents.tensors[entry.key].contiguous())
                    assert view is not None
                    file.seek(layout.start(entry.name))
                    _write_all(file, view.cpu().numpy().data)
                os.fsync(file.fileno())
    except OSError as error:
        raise CloneError(f"cannot write {home}: {error.strerror or error}") from error
    return home.resolve()


def write_extras(folder: Path, session: str, rank: int, memory: npt.NDArray[np.uint8]) -> Path:
    """Write what a rank has beside tensors below the run's folder; where it is.

    Raises:
        CloneError: it cannot be written.
    """
    path = _home(folder, session) / f"extras-{rank}"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb", buffering=0) as file:
            _write_all(file, memory.data)
            os.fsync(file.fileno())
    except OSError as error:
        raise CloneError(f"cannot write {path}: {error.strerror or error}") from error
    return path.resolve()


def read_extras(path: Path) -> npt.NDArray[np.uint8]:
    """What ``write_extras`` has written.

    Raises:
        CloneError: it cannot be read.
    """
    try:
        return np.fromfile(path, np.uint8)
    except OSError as error:
        raise CloneError(f"cannot read {path}: {error.strerror or error}") from error


def _write_all(file: FileIO, data: memoryview) -> None:
    while data.nbytes:
        data = data[file.write(data) :]


def read_state(home: Path, catalog: Catalog, into: Mapping[Key, Tensor]) -> None:
    """Fill memory with the bytes of all tensors.

    Raises:
        CloneError: they cannot be read.
    """
    for layout in catalog.layouts.values():
        path = home / layout.filename
        try:
            with path.open("rb", buffering=0) as file:
                size = os.fstat(file.fileno()).st_size
                if size != layout.size:
                    raise CloneError(f"{path} has {size} bytes, expected {layout.size}")
                for entry in layout.entries:
                    file.seek(layout.start(entry.name))
                    _read_all(file, into[entry.key].numpy().data)
        except OSError as error:
            raise CloneError(f"cannot read {path}: {error.strerror or error}") from error


def _read_all(file: FileIO, into: memoryview) -> None:
    while into.nbytes:
        count = file.readinto(into)
        if not count:
            raise OSError(f"{file.name} has become shorter")
        into = into[count:]


def remove_state(folder: Path, session: str) -> None:
    """Remove what was written, if it was."""
    home = _home(folder, session)
    shutil.rmtree(home, ignore_errors=True)
    try:
        home.parent.rmdir()
    except OSError:
        return  # other forks are under way, or there was none
