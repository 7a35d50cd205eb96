"""Files that are kept with a version, beside its tensors: config.json, a tokenizer."""

from __future__ import annotations

from collections.abc import Mapping

from sapwood.errors import ConfigError
from sapwood.repository.base import NOTHING
from sapwood.repository.manifest import Manifest
from sapwood.repository.names import check_file

__all__ = ["FILES", "FILE_BYTES", "WEIGHTS", "alike_files", "check_files"]

FILE_BYTES = 256 * 2**20
"""The most that one kept file may have: what is larger is mostly weights, which go as tensors."""
FILES = 1000
"""The most files of one version: their names are in its manifest, which is read at every open."""
WEIGHTS = "model.safetensors"
"""What the tensors of a version are called among its files, unless it came from another name."""


def check_files(files: Mapping[str, bytes | memoryview]) -> dict[str, memoryview]:
    """The files as bytes.

    Raises:
        BadName: a name is no path inside a folder.
        ConfigError: there are too many, one is too large, or is called as the weights are.
    """
    if len(files) > FILES:
        raise ConfigError(f"{len(files)} files are to be kept with a version, expected {FILES}")
    found = {check_file(name): _bytes(name, data) for name, data in files.items()}
    for name, data in found.items():
        if len(data) > FILE_BYTES:
            raise ConfigError(
                f"the file {name} has {len(data)} bytes; a file that is kept with a version has at "
                f"most {FILE_BYTES}: leave it out, or save what is in it as tensors"
            )
        folder = next((other for other in found if other.startswith(f"{name}/")), None)
        if folder is not None:
            raise ConfigError(f"{name} is a file, and a folder with {folder} in it: rename one")
    if WEIGHTS in found:
        raise ConfigError(
            f"a kept file cannot be called {WEIGHTS}: that is what the tensors themselves are "
            "given out as; rename it"
        )
    return found


def _bytes(name: str, data: object) -> memoryview:
    if not isinstance(data, (bytes, bytearray, memoryview)):
        raise ConfigError(
            f"files[{name!r}] is a {type(data).__name__}, expected bytes: encode text, read a file"
        )
    return memoryview(bytes(data) if isinstance(data, bytearray) else data).cast("B")


def alike_files(files: Mapping[str, memoryview], parent: Manifest, first: int) -> dict[int, int]:
    """For each file, the parent's blob that may hold the same bytes; the first is ``first``."""
    theirs = dict(parent.files)
    found = {}
    for number, (name, data) in enumerate(files.items(), first):
        row = parent.row(theirs[name]) if name in theirs else None
        if row is not None and row.blob != NOTHING and row.nbytes == len(data):
            found[number] = row.blob
    return found
