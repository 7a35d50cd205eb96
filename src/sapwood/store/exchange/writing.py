"""Writing a version into a file or a folder that is not there yet: whole, or not at all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from sapwood.errors import ConfigError, StoreError
from sapwood.storage.files import Files
from sapwood.storage.newfile import new_file
from sapwood.store.exchange.outgoing import OutFile, as_folder, whole_file
from sapwood.store.stored import StoredModel

__all__ = ["write_model"]

_FILES = (".safetensors", ".pt", ".pth")
Advance = Callable[[int], None]


def write_model(
    stored: StoredModel,
    path: Path,
    *,
    shard_bytes: int | None = None,
    advance: Advance = lambda _: None,
) -> int:
    """Write a version into a ``.safetensors`` or ``.pt`` file, or into a folder; the bytes written.

    A folder gets every file that was kept with the version, byte for byte, and its weights as
    ``.safetensors`` files, called and split as they came.

    Args:
        stored: the version.
        path: where to; a name without one of these endings is a folder.
        shard_bytes: split the weights of a folder anew, into files of at most so many bytes.
        advance: called with the bytes that were written since the last call.

    Raises:
        ConfigError: it is there, or its name ends in something else.
        StoreError: it cannot be written, or the model does not fit the format.
    """
    if shard_bytes is not None and shard_bytes <= 0:
        raise ConfigError(f"a shard of {shard_bytes} bytes was asked for, expected at least 1")
    if path.suffix in _FILES:
        if shard_bytes is not None:
            raise ConfigError(f"{path} is one file; to split the weights, name a folder")
        return _write_file(stored, path, advance)
    if path.suffix in (".bin", ".ckpt", ".zip", ".h5", ".onnx", ".gguf", ".tar"):
        raise ConfigError(
            f"{path}: expected a file that ends in .safetensors, .pt or .pth, or a folder"
        )
    return _write_folder(stored, path, shard_bytes, advance)


def _write_file(stored: StoredModel, path: Path, advance: Advance) -> int:
    if path.exists():
        raise ConfigError(f"{path} exists and is never overwritten; choose another name")
    file = whole_file(stored) if path.suffix == ".safetensors" else None
    with _failures_of(path), new_file(path) as draft:
        if file is not None:
            _write(file, draft, advance)
        else:
            # Given a path, torch opens it itself and raises RuntimeError where that fails.
            with draft.open("xb") as opened:
                torch.save(stored.value(), opened)
            advance(stored.manifest.nbytes)
    return path.stat().st_size


def _write_folder(
    stored: StoredModel, path: Path, shard_bytes: int | None, advance: Advance
) -> int:
    if path.resolve() in (Path.cwd(), *Path.cwd().parents):
        raise ConfigError(f"{path} is the folder you are in, or above it; name one below")
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise ConfigError(
            f"{path} exists and is never overwritten; name a folder that is empty or not there, "
            "or a file that ends in .safetensors or .pt"
        )
    table = as_folder(stored, shard_bytes=shard_bytes)
    draft = path.with_name(f".{path.name}.draft-{os.getpid()}")
    with _failures_of(path):
        try:
            draft.mkdir()
            for name, file in table.items():
                (draft / name).parent.mkdir(parents=True, exist_ok=True)
                _write(file, draft / name, advance, sync=True)
            draft.rename(path)  # it fails if somebody put something there meanwhile
            Files().sync_folder(path.absolute().parent)
        finally:
            shutil.rmtree(draft, ignore_errors=True)
    return sum(file.size for file in table.values())


def _write(file: OutFile, path: Path, advance: Advance, *, sync: bool = False) -> None:
    at = 0
    with Files().create(path) as writer:
        for block in file.blocks(0, file.size):
            writer.write_at(at, block)
            at += len(block)
            advance(len(block))
        if sync:
            writer.sync()


@contextmanager
def _failures_of(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StoreError(f"cannot write {path}: {error.strerror or error}") from error
