"""A fork through files: what everybody does today, here to be compared with.

Rank 0 writes the whole state as safetensors while the others wait for its next step; the clones
read it when it is synced.
"""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as Overdue
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from sapwood.clone.plan import Key
from sapwood.errors import CloneError
from sapwood.regular import open_regular
from sapwood.runtime import faults
from sapwood.state.catalog import Catalog, FileLayout
from sapwood.state.contents import Contents, ordered_bytes
from sapwood.tiers.digest import digest_of_row

__all__ = [
    "FiledState",
    "read_extras",
    "read_state",
    "remove_state",
    "sync_state",
    "write_extras",
    "write_in_time",
    "write_state",
]

_GRACE = 0.05
_CHUNK = 16 * 2**20
"""Between two of these it is seen whether writing takes too long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FiledState:
    """Where a state was written, and the checksum of each file's tensors."""

    home: str
    marks: dict[str, str]

    @classmethod
    def from_json(cls, said: Any) -> FiledState:
        """What a donor has said.

        Raises:
            CloneError: it is not that.
        """
        try:
            return cls(home=str(said["home"]), marks=dict(said["marks"]))
        except (KeyError, TypeError, ValueError) as error:
            raise CloneError(f"the run does not say where the state is: {said!r}") from error


def _home(folder: Path, session: str) -> Path:
    return folder / "clones" / session[:16]


def write_state(
    folder: Path, session: str, contents: Contents, *, algorithm: str, patience: float
) -> FiledState:
    """Write all tensors below the run's folder, within ``patience`` seconds.

    The files are not synced yet: that may take long, and needs no tensor to stay as it is.

    Raises:
        CloneError: they cannot be written, or not in time.
    """
    home = _home(folder, session)
    deadline = time.monotonic() + patience
    marks = {}
    try:
        home.mkdir(parents=True, exist_ok=True)
        for layout in contents.catalog.layouts.values():
            with (home / layout.filename).open("wb", buffering=0) as file:
                file.write(layout.header)
                chunks = _written(file, layout, contents, deadline)
                marks[layout.filename] = digest_of_row(chunks, algorithm)
    except TimeoutError:
        raise _late(home, patience) from None
    except OSError as error:
        raise CloneError(f"cannot write {home}: {error.strerror or error}") from error
    return FiledState(home=str(home.resolve()), marks=marks)


def write_in_time(
    folder: Path, session: str, contents: Contents, *, algorithm: str, patience: float
) -> FiledState:
    """The same on a thread of its own: a file system that hangs must not take its caller along.

    Raises:
        CloneError: they cannot be written, or not in time; then nothing of them stays.
    """
    written: Future[FiledState] = Future()

    def write() -> None:
        try:
            state = write_state(folder, session, contents, algorithm=algorithm, patience=patience)
        except BaseException as error:
            remove_state(folder, session)  # also what came after everybody had given up
            written.set_exception(error)
        else:
            written.set_result(state)

    threading.Thread(target=write, name="sapwood-clone-file", daemon=True).start()
    try:
        # Whoever is in time says better what happened.
        return written.result(patience + _GRACE)
    except Overdue:
        raise _late(_home(folder, session), patience) from None


def _late(home: Path, patience: float) -> CloneError:
    return CloneError(
        f"the state could not be written to {home} in the {patience:.3g} s that the training "
        "waits for a fork; raise patience=, or use another approach than 'file'"
    )


def _written(
    file: FileIO, layout: FileLayout, contents: Contents, deadline: float
) -> Iterator[memoryview]:
    """Each piece of the tensors, as it has been written."""
    for entry in layout.entries:
        data = ordered_bytes(contents.tensors[entry.key]).cpu().numpy().data
        file.seek(layout.start(entry.name))
        for start in range(0, data.nbytes, _CHUNK):
            if time.monotonic() > deadline:
                raise TimeoutError
            chunk = data[start : start + _CHUNK]
            faults.point("clone.write", path=file.name)
            _write_all(file, chunk)
            yield chunk


def sync_state(state: FiledState) -> None:
    """Make what was written durable.

    Raises:
        CloneError: it cannot be.
    """
    for name in state.marks:
        path = Path(state.home) / name
        try:
            with path.open("rb") as file:
                os.fsync(file.fileno())
        except OSError as error:
            raise CloneError(f"cannot write {path}: {error.strerror or error}") from error


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
        with os.fdopen(open_regular(path), "rb") as file:
            return np.fromfile(file, np.uint8)
    except OSError as error:
        raise CloneError(f"cannot read {path}: {error.strerror or error}") from error


def _write_all(file: FileIO, data: memoryview) -> None:
    while data.nbytes:
        data = data[file.write(data) :]


def read_state(
    state: FiledState, catalog: Catalog, into: Mapping[Key, Tensor], *, algorithm: str
) -> None:
    """Fill memory with the bytes of all tensors.

    Raises:
        CloneError: they cannot be read, or are not those that were written.
    """
    for layout in catalog.layouts.values():
        path = Path(state.home) / layout.filename
        try:
            with os.fdopen(open_regular(path), "rb", buffering=0) as file:
                size = os.fstat(file.fileno()).st_size
                if size != layout.size:
                    raise CloneError(f"{path} has {size} bytes, expected {layout.size}")
                found = digest_of_row(_read(file, layout, into), algorithm)
        except OSError as error:
            raise CloneError(f"cannot read {path}: {error.strerror or error}") from error
        if found != state.marks.get(layout.filename):
            raise CloneError(f"{path} was changed after it was written: its checksum is another")


def _read(file: FileIO, layout: FileLayout, into: Mapping[Key, Tensor]) -> Iterator[memoryview]:
    for entry in layout.entries:
        memory = into[entry.key].numpy().data
        file.seek(layout.start(entry.name))
        _read_all(file, memory)
        yield memory


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
