"""Models from files and to files: safetensors, torch's own, and folders of Hugging Face."""

from __future__ import annotations

import json
import os
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sapwood.errors import ConfigError, Damaged, StoreError
from sapwood.regular import open_regular, read_regular
from sapwood.repository.manifest import TensorRow
from sapwood.state.safetensors import TORCH_NAMES, FilePart, make_header, read_header
from sapwood.storage.files import Files
from sapwood.storage.newfile import new_file
from sapwood.store.raw import tensor_in
from sapwood.store.stored import StoredModel

__all__ = ["read_model", "write_model"]

_TORCH = (".pt", ".pth", ".bin")
_INDEX = "model.safetensors.index.json"
_SAFE_NAMES = {name: code for code, name in TORCH_NAMES.items()}


def read_model(path: Path) -> tuple[Any, dict[str, Any]]:
    """The value in a file or folder, and what is to be remembered of it.

    Tensors of safetensors files are mapped, not read.

    Raises:
        ConfigError: it is of no kind that is known.
        Damaged: it is not sound.
    """
    if path.is_dir():
        return _read_folder(path)
    if not path.exists():
        raise ConfigError(f"there is no {path}")
    if path.suffix == ".safetensors":
        tensors, metadata = _read_safetensors(path)
        return tensors, {"from": path.name, **({"metadata": metadata} if metadata else {})}
    if path.suffix in _TORCH:
        return _read_torch(path), {"from": path.name}
    raise ConfigError(
        f"{path}: expected a file that ends in .safetensors, .pt, .pth or .bin, or a folder with "
        "safetensors files, as Hugging Face has them"
    )


def write_model(
    stored: StoredModel, path: Path, *, advance: Callable[[int], None] = lambda _: None
) -> int:
    """Write a stored model to a ``.safetensors`` or ``.pt`` file that is not there; its size.

    Raises:
        ConfigError: the file is there, or of no kind that is known.
        StoreError: it cannot be written, or the model does not fit its format.
    """
    if path.suffix not in (".safetensors", ".pt", ".pth"):
        raise ConfigError(f"{path}: expected a file that ends in .safetensors, .pt or .pth")
    if path.exists():
        raise ConfigError(f"{path} exists and is never overwritten; choose another name")
    with _draft(path) as draft:
        if path.suffix == ".safetensors":
            _write_safetensors(stored, draft, advance)
        else:
            torch.save(stored.value(), draft)
            advance(stored.manifest.nbytes)
    return path.stat().st_size


# -- reading ---------------------------------------------------------------------------------------


def _read_safetensors(path: Path) -> tuple[OrderedDict[str, Tensor], dict[str, str]]:
    try:
        header = read_header(path)
        fd = open_regular(path)
    except ValueError as error:
        raise Damaged(f"{path}: not a sound .safetensors file: {error}") from error
    except OSError as error:
        raise StoreError(f"cannot read {path}: {error.strerror or error}") from error
    with os.fdopen(fd, "rb") as file:
        # Copy-on-write, so that nobody who writes to a tensor changes the file.
        whole = np.memmap(file, np.uint8, "c") if header.parts else np.empty(0, np.uint8)
    tensors = OrderedDict((part.name, _tensor(whole, part)) for part in header.parts)
    metadata = {key: value for key, value in header.metadata.items() if key != "format"}
    return tensors, metadata


def _tensor(whole: Any, part: FilePart) -> Tensor:
    row = TensorRow(0, TORCH_NAMES[part.dtype], part.shape, part.nbytes, 0)
    raw = whole[part.start : part.start + part.nbytes]
    if part.start % 8:  # tensors must be aligned, and old files do not align them
        raw = raw.copy()
    return tensor_in(raw, row)


def _read_torch(path: Path) -> Any:
    try:
        fd = open_regular(path)
    except OSError as error:
        raise StoreError(f"cannot read {path}: {error.strerror or error}") from error
    try:
        with os.fdopen(fd, "rb") as file:
            return torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # of many kinds, for a file that may hold anything
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise StoreError(
            f"{path} cannot be loaded without running code from it (weights_only): {reason}; load "
            "it yourself where you trust it, and save its state dict"
        ) from error


def _read_folder(path: Path) -> tuple[Any, dict[str, Any]]:
    index = path / _INDEX
    if index.exists():
        files = sorted(set(_index(index).values()))
    else:
        files = sorted(one.name for one in path.glob("*.safetensors"))
    if not files:
        raise ConfigError(f"{path} holds no .safetensors files")
    tensors: OrderedDict[str, Tensor] = OrderedDict()
    for name in files:
        found, _ = _read_safetensors(path / name)
        doubled = found.keys() & tensors.keys()
        if doubled:
            raise Damaged(f"{path}: {min(doubled)} is in several files")
        tensors.update(found)
    return tensors, {"from": path.name}


def _index(path: Path) -> Mapping[str, str]:
    try:
        found = json.loads(read_regular(path))["weight_map"]
    except (ValueError, KeyError, TypeError, OSError) as error:
        raise Damaged(f"{path}: not a sound index: {error}") from error
    if not isinstance(found, dict) or not all(isinstance(v, str) for v in found.values()):
        raise Damaged(f"{path}: not a sound index")
    outside = [name for name in found.values() if Path(name).name != name]
    if outside:
        raise Damaged(f"{path}: {outside[0]!r} is not a file of this folder")
    return found


# -- writing ---------------------------------------------------------------------------------------


def _write_safetensors(stored: StoredModel, draft: Path, advance: Callable[[int], None]) -> None:
    rows = [(name, stored.manifest.row(number)) for name, number in stored.manifest.names]
    unknown = sorted({row.dtype for _, row in rows if row.dtype not in _SAFE_NAMES})
    if unknown:
        raise StoreError(
            f"{stored.record.reference} has tensors of {', '.join(unknown)}, which safetensors "
            "files cannot hold; write a .pt file"
        )
    # Wide dtypes first, so that each tensor is aligned.
    rows.sort(key=lambda row: -getattr(torch, row[1].dtype).itemsize)
    header = make_header((name, _SAFE_NAMES[row.dtype], row.shape) for name, row in rows)
    with Files().create(draft) as writer:
        writer.write_at(0, header)
        at = len(header)
        for _, row in rows:
            for block in stored.blocks(row):
                writer.write_at(at, block)
                at += len(block)
                advance(len(block))


@contextmanager
def _draft(out: Path) -> Iterator[Path]:
    try:
        with new_file(out) as draft:
            yield draft
    except OSError as error:
        raise StoreError(f"cannot write {out}: {error.strerror or error}") from error
