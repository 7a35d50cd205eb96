"""A fork through files: what everybody does today, here to be compared with.

Rank 0 writes the whole state as safetensors while the others wait for its next step; the clones
read it when it is synced.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import numpy.typing as npt

from sapwood.errors import CloneError
from sapwood.state.catalog import Catalog
from sapwood.state.contents import Contents, byte_view
from sapwood.tiers.files import Files

__all__ = ["read_state", "remove_state", "write_state"]


def _home(folder: Path, session: str) -> Path:
    return folder / "clones" / session[:16]


def write_state(folder: Path, session: str, contents: Contents) -> Path:
    """Write all tensors below the run's folder; where they are.

    Raises:
        CloneError: they cannot be written.
    """
    home, files = _home(folder, session), Files()
    try:
        files.make_folder(home)
        for layout in contents.catalog.layouts.values():
            with files.create(home / layout.filename) as writer:
                writer.write_at(0, layout.header)
                for entry in layout.entries:
                    view = byte_view(contents.tensors[entry.key].contiguous())
                    assert view is not None
                    writer.write_at(layout.start(entry.name), view.cpu().numpy())
                writer.sync()
    except OSError as error:
        raise CloneError(f"cannot write {home}: {error.strerror or error}") from error
    return home.resolve()


def read_state(home: Path, catalog: Catalog) -> dict[tuple[str, str], npt.NDArray[np.uint8]]:
    """The bytes of all tensors.

    Raises:
        CloneError: they cannot be read.
    """
    found = {}
    for layout in catalog.layouts.values():
        path = home / layout.filename
        try:
            whole = np.fromfile(path, np.uint8)
        except OSError as error:
            raise CloneError(f"cannot read {path}: {error.strerror or error}") from error
        if len(whole) != layout.size:
            raise CloneError(f"{path} has {len(whole)} bytes, expected {layout.size}")
        for entry in layout.entries:
            start = layout.start(entry.name)
            found[entry.key] = whole[start : start + entry.nbytes]
    return found


def remove_state(folder: Path, session: str) -> None:
    """Remove what was written, if it was."""
    home = _home(folder, session)
    shutil.rmtree(home, ignore_errors=True)
    try:
        home.parent.rmdir()
    except OSError:
        return  # other forks are under way, or there was none
