"""Reading training samples as fast as the disk allows."""

from __future__ import annotations

from sapwood.data.index import Index, build_index, list_databases
from sapwood.data.pagefile import Fingerprint
from sapwood.data.sidecar import index_file, load_index, open_index, save_index

__all__ = [
    "Fingerprint",
    "Index",
    "build_index",
    "index_file",
    "list_databases",
    "load_index",
    "open_index",
    "save_index",
]
