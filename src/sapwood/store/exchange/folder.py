"""Reading a folder of Hugging Face: weights in one file or several, and every other file of it."""

from __future__ import annotations

import json
import os
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from torch import Tensor

from sapwood.errors import ConfigError, Damaged, StoreError
from sapwood.regular import read_regular
from sapwood.repository.names import check_file
from sapwood.store.exchange.incoming import Incoming
from sapwood.store.exchange.safefile import map_file, read_safetensors
from sapwood.store.exchange.torchfile import read_torch
from sapwood.store.kept import FILE_BYTES, FILES, WEIGHTS

__all__ = ["INDEX", "read_folder", "weight_map"]

INDEX = ".index.json"
"""What the name of the weights ends in, in the name of the file that says which shard has what."""
_TORCH_WEIGHTS = "pytorch_model.bin"
_OF_TOOLS = (".git", ".cache", "__pycache__")
"""Folders that are not of the model: what tools keep beside it."""


@dataclass
class _Weights:
    """Which files of a folder hold the tensors."""

    files: Sequence[str]
    name: str = WEIGHTS
    """What the tensors are called as one file."""
    index: str = ""
    """The file that says which of them has what; empty if there is none."""
    said: list[str] = field(default_factory=list)
    """What a user should know of them."""


def read_folder(path: Path, without: Sequence[str] = ()) -> Incoming:
    """The tensors of a folder, and its other files, without those that fit a pattern.

    Raises:
        ConfigError: it holds no weights, or a file that cannot be kept.
        Damaged: its files contradict each other.
        StoreError: something cannot be read.
    """
    names = [n for n in _names(path) if not any(fnmatchcase(n, one) for one in without)]
    weights = _weights(path, names)
    tensors, metadata = _tensors(path, weights)
    note: dict[str, Any] = {"from": path.resolve().name}
    if metadata:
        note["metadata"] = metadata
    if weights.name != WEIGHTS:
        note["weights"] = weights.name
    others = [name for name in names if name not in weights.files]
    if weights.name == WEIGHTS and weights.index.startswith("pytorch"):
        others.remove(weights.index)  # of files that there are none of any more
    return Incoming(
        value=tensors,
        note=note,
        files=_others(path, others),
        said=(*weights.said, *_left_out(path)),
    )


def weight_map(content: bytes, where: str) -> dict[str, str]:
    """Which file each tensor is in, from the content of an index.

    Raises:
        Damaged: it is no index, or names a file outside of its folder.
    """
    try:
        found = json.loads(content)["weight_map"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise Damaged(f"{where}: not a sound index: {error}") from error
    if not isinstance(found, dict) or not all(isinstance(v, str) for v in found.values()):
        raise Damaged(f"{where}: not a sound index")
    outside = [name for name in found.values() if name in ("", "..") or Path(name).name != name]
    if outside:
        raise Damaged(f"{where}: {outside[0]!r} is not a file of this folder")
    return found


def _names(path: Path) -> list[str]:
    """Every file below a folder, also in folders of it."""
    found = []
    try:
        for root, folders, files in os.walk(path, onerror=_raise):
            if Path(root) == path:
                folders[:] = [one for one in folders if one not in _OF_TOOLS]
            found += [(Path(root) / one).relative_to(path).as_posix() for one in files]
            if len(found) > 10 * FILES:
                raise ConfigError(f"{path} holds more than {10 * FILES} files: it is no model's")
    except OSError as error:
        raise StoreError(f"cannot list {path}: {error.strerror or error}") from error
    return sorted(found)


def _raise(error: OSError) -> None:
    raise error


def _left_out(path: Path) -> Iterator[str]:
    for name in _OF_TOOLS:
        if (path / name).is_dir():
            yield f"{name} is left out: it is not of the model"
    for root, folders, _ in os.walk(path):
        for folder in folders:
            if (Path(root) / folder).is_symlink():  # which may lead out of here, or in a circle
                link = (Path(root) / folder).relative_to(path)
                yield f"{link} is left out: it is a link to a folder"


def _weights(path: Path, names: Sequence[str]) -> _Weights:
    top = [name for name in names if "/" not in name]
    safe = [name for name in top if name.endswith(".safetensors")]
    indexes = [name for name in top if name.endswith(f".safetensors{INDEX}")]
    if f"{WEIGHTS}{INDEX}" in indexes:
        indexes = [f"{WEIGHTS}{INDEX}"]
    if len(indexes) > 1:
        raise ConfigError(
            f"{path} holds several models: {', '.join(indexes)}; leave all but one out (--without)"
        )
    if indexes:
        return _indexed(path, indexes[0])
    if WEIGHTS in safe or len(safe) == 1:
        name = WEIGHTS if WEIGHTS in safe else safe[0]
        return _Weights([name], name)
    if safe:
        joined = f"{', '.join(safe)} become one file, {WEIGHTS}: no index says what is where"
        return _Weights(safe, said=[joined])
    return _of_torch(path, top)


def _indexed(path: Path, index: str, name: str = "") -> _Weights:
    try:
        places = weight_map(read_regular(path / index), str(path / index))
    except OSError as error:
        raise StoreError(f"cannot read {path / index}: {error.strerror or error}") from error
    found = _Weights(sorted(set(places.values())), name or index.removesuffix(INDEX), index)
    ending = ".bin" if name else ".safetensors"
    for file in found.files:
        if not file.endswith(ending):
            raise Damaged(f"{path / index}: expected files that end in {ending}, found {file!r}")
    return found


def _of_torch(path: Path, top: Sequence[str]) -> _Weights:
    index = f"{_TORCH_WEIGHTS}{INDEX}"
    said = [f"{_TORCH_WEIGHTS} comes back as {WEIGHTS}"]
    if index in top:
        found = _indexed(path, index, WEIGHTS)
        found.said += [*said, f"{index} is left out: it is of files that do not come back"]
        return found
    if _TORCH_WEIGHTS in top:
        return _Weights([_TORCH_WEIGHTS], said=said)
    raise ConfigError(
        f"{path} holds no .safetensors files, and no {_TORCH_WEIGHTS}; where the weights are in a "
        "folder of it, name that one"
    )


def _tensors(path: Path, weights: _Weights) -> tuple[OrderedDict[str, Any], dict[str, str]]:
    tensors: OrderedDict[str, Any] = OrderedDict()
    metadata: dict[str, str] = {}
    for name in weights.files:
        if not (path / name).exists():
            raise Damaged(f"{path}: {weights.index} names {name}, which is not there")
        found, facts = _read(path / name)
        doubled = found.keys() & tensors.keys()
        if doubled:
            raise Damaged(f"{path}: {min(doubled)} is in several files")
        tensors.update(found)
        differing = sorted(key for key in facts if metadata.get(key, facts[key]) != facts[key])
        if differing:
            weights.said.append(f"{name}: its metadata {', '.join(differing)} is not kept")
        metadata = facts | metadata
    if weights.index:
        index = read_regular(path / weights.index)
        lacking = sorted(weight_map(index, weights.index).keys() - tensors.keys())
        if lacking:
            raise Damaged(f"{path}: {weights.index} names {lacking[0]}, which is in no file")
    return tensors, metadata


def _read(file: Path) -> tuple[Mapping[str, Any], dict[str, str]]:
    if file.name.endswith(".safetensors"):
        content = read_safetensors(file)
        return content.tensors, content.metadata
    value = read_torch(file)
    if not isinstance(value, Mapping) or not all(isinstance(one, Tensor) for one in value.values()):
        raise Damaged(f"{file}: expected a dictionary of tensors by name")
    return value, {}


def _others(path: Path, names: Sequence[str]) -> dict[str, memoryview]:
    if len(names) > FILES:
        raise ConfigError(
            f"{path} holds {len(names)} files beside its weights, and at most {FILES} are kept "
            "with a version; leave some out (--without)"
        )
    found = {}
    for name in names:
        check_file(name)
        try:
            content = map_file(path / name)
        except OSError as error:
            raise StoreError(f"cannot read {path / name}: {error.strerror or error}") from error
        if len(content) > FILE_BYTES:
            raise ConfigError(
                f"{path / name} has {len(content)} bytes, and a file that is kept beside the "
                f"weights has at most {FILE_BYTES}; leave it out: --without {name!r}"
            )
        found[name] = content
    return found
