"""Reading what ``torch.save`` wrote, without ever running code from it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from sapwood.errors import StoreError
from sapwood.regular import open_regular

__all__ = ["TORCH", "read_torch"]

TORCH = (".pt", ".pth", ".bin", ".ckpt")
_ZIP = b"PK\x03\x04"


def read_torch(path: Path) -> Any:
    """The value in a file. Its tensors are mapped where the file is of the kind that can be.

    Raises:
        StoreError: it cannot be read, or not without running code from it.
    """
    try:
        fd = open_regular(path)
    except OSError as error:
        raise StoreError(f"cannot read {path}: {error.strerror or error}") from error
    try:
        mappable = os.pread(fd, len(_ZIP), 0) == _ZIP
        # By its descriptor: another file may stand at the path by now, also one that blocks.
        whole = f"/proc/self/fd/{fd}"
        return torch.load(whole, map_location="cpu", weights_only=True, mmap=mappable)
    except Exception as error:  # of many kinds, for a file that may hold anything
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise StoreError(
            f"{path} cannot be loaded without running code from it (weights_only): {reason}; load "
            "it yourself where you trust it, and save its state dict"
        ) from error
    finally:
        os.close(fd)
