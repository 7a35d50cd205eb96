"""Models from files and to files: safetensors, torch's own, and folders of Hugging Face."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from sapwood.errors import ConfigError
from sapwood.store.exchange.folder import read_folder
from sapwood.store.exchange.incoming import Incoming
from sapwood.store.exchange.outgoing import OutFile, as_folder
from sapwood.store.exchange.safefile import read_safetensors
from sapwood.store.exchange.torchfile import TORCH, read_torch
from sapwood.store.exchange.writing import write_model

__all__ = ["Incoming", "OutFile", "as_folder", "read_model", "write_model"]


def read_model(path: Path, *, without: Sequence[str] = ()) -> Incoming:
    """The model in a file or folder, and what is to be kept of it beside tensors.

    Tensors of safetensors files are mapped, not read.

    Args:
        path: a ``.safetensors`` file, one of ``torch.save``, or a folder of Hugging Face.
        without: patterns of files of a folder that are left out.

    Raises:
        ConfigError: it is of no kind that is known.
        Damaged: it is not sound.
        StoreError: it cannot be read.
    """
    if path.is_dir():
        return read_folder(path, without)
    if not path.exists():
        raise ConfigError(f"there is no {path}")
    if path.suffix == ".safetensors":
        content = read_safetensors(path)
        note = {"metadata": content.metadata} if content.metadata else {}
        return Incoming(value=content.tensors, note={"from": path.name, **note})
    if path.suffix in TORCH:
        return Incoming(value=read_torch(path), note={"from": path.name})
    raise ConfigError(
        f"{path}: expected a file that ends in .safetensors or {', '.join(TORCH)}, or a folder "
        "with such files, as Hugging Face has them"
    )
