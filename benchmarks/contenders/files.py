"""Files of a checkpoint: making them durable where a contender does not, and counting them."""

from __future__ import annotations

import os
from pathlib import Path


def sync_path(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(folder: Path) -> None:
    """fsync of every file and folder: what a contender that stops at close() leaves undone."""
    for parent, _, names in os.walk(folder):
        for name in names:
            sync_path(Path(parent, name))
        sync_path(Path(parent))
    sync_path(folder.parent)


def tree_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
