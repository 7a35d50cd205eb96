"""Reading training samples as fast as the disk allows.

The names that need torch are loaded when used, so that looking at a database does not.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from sapwood.data.batch import Batch
from sapwood.data.index import Index, build_index, list_databases
from sapwood.data.pagefile import Fingerprint
from sapwood.data.provenance import Provenance
from sapwood.data.settings import Reuse
from sapwood.data.sidecar import index_file, load_index, open_index, save_index
from sapwood.data.skew import skew_of
from sapwood.data.stats import ReadStats

if TYPE_CHECKING:
    from sapwood.data.reader import LmdbReader
    from sapwood.data.records import LmdbRecords
    from sapwood.data.stagger import Stagger

__all__ = [
    "Batch",
    "Fingerprint",
    "Index",
    "LmdbReader",
    "LmdbRecords",
    "Provenance",
    "ReadStats",
    "Reuse",
    "Stagger",
    "build_index",
    "index_file",
    "list_databases",
    "load_index",
    "open_index",
    "save_index",
    "skew_of",
]

_NEEDS_TORCH = {
    "LmdbReader": "sapwood.data.reader",
    "LmdbRecords": "sapwood.data.records",
    "Stagger": "sapwood.data.stagger",
}


def __getattr__(name: str) -> Any:
    if name not in _NEEDS_TORCH:
        raise AttributeError(f"module 'sapwood.data' has no attribute {name!r}")
    return getattr(import_module(_NEEDS_TORCH[name]), name)
