"""What is under a folder: a disk of this node, its memory, or a network."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["filesystem_of", "kind_of"]

_NETWORK = {"nfs", "nfs4", "lustre", "gpfs", "beegfs", "ceph", "cifs", "smb3", "9p", "afs"} | {
    "panfs",
    "wekafs",
    "virtiofs",
    "fuse.sshfs",
    "fuse.s3fs",
    "fuse.goofys",
    "fuse.juicefs",
    "fuse.glusterfs",
    "fuse.ceph",
    "fuse.gcsfuse",
    "fuse.mount-s3",
    "fuse.rclone",
    "orangefs",
    "pvfs2",
}
_MEMORY = {"tmpfs", "ramfs"}


def kind_of(filesystem: str) -> str:
    """``disk`` (of this node), ``network`` or ``memory``."""
    if filesystem in _NETWORK:
        return "network"
    return "memory" if filesystem in _MEMORY else "disk"


def filesystem_of(folder: Path) -> str:
    """The type of the mount a folder is on, by its device number."""
    device = folder.stat().st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    for line in Path("/proc/self/mountinfo").read_text(errors="surrogateescape").splitlines():
        fields, _, tail = line.partition(" - ")
        if fields.split()[2] == wanted:
            return tail.split()[0]
    return "unknown"
