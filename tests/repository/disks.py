"""A disk whose power can be cut: a file system in an image, of which a copy is taken in use.

What was not synced is in memory, and not in the image. So the copy is what a machine would find
after power was cut at that moment: the file system repairs itself from its journal when it is
mounted, and holds what it owes.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

NBYTES = 48 * 2**20
TOOLS = ("mkfs.ext4", "mount", "umount", "losetup")


def missing() -> str | None:
    """Why there cannot be such a disk here, or None."""
    search = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])
    absent = [tool for tool in TOOLS if shutil.which(tool, path=search) is None]
    if absent or os.geteuid() != 0:
        return f"needs root and {', '.join(TOOLS)}"
    found = subprocess.run(["losetup", "--find"], capture_output=True, text=True, timeout=30)
    return None if found.returncode == 0 else f"no loop device: {found.stderr.strip()}"


def new_disk(image: Path) -> None:
    with image.open("wb") as file:
        file.truncate(NBYTES)
    _call("mkfs.ext4", "-q", "-F", "-E", "lazy_itable_init=0,lazy_journal_init=0", image)


@contextmanager
def mounted(image: Path, folder: Path) -> Iterator[Path]:
    """``image`` at ``folder``; nothing gets there by itself for five minutes."""
    folder.mkdir(exist_ok=True)
    _call("mount", "-o", "loop,commit=300", image, folder)
    try:
        yield folder
    finally:
        _call("umount", "--lazy", folder)  # tensors of a test that failed may still be mapped


def cut(image: Path, copy: Path) -> Path:
    """What the disk holds if power is cut now."""
    _call("cp", "--sparse=always", image, copy)
    return copy


def _call(*command: str | Path) -> None:
    subprocess.run([str(word) for word in command], check=True, timeout=60, capture_output=True)
