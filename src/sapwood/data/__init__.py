"""Reading training samples as fast as the disk allows.

The names that need torch, or that write, are loaded when used: looking at a database needs neither.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from sapwood.data.batch import Batch
from sapwood.data.index import Index, build_index, list_databases
from sapwood.data.pagefile import Fingerprint
from sapwood.data.provenance import Provenance
from sapwood.data.report import Reading, readings_of
from sapwood.data.settings import Reuse
from sapwood.data.sidecar import index_file, load_index, open_index, save_index
from sapwood.data.skew import skew_of
from sapwood.data.stats import ReadStats

if TYPE_CHECKING:
    from sapwood.data.reader import LmdbReader
    from sapwood.data.records import LmdbRecords
    from sapwood.data.stagger import Stagger
    from sapwood.data.write.about import read_about
    from sapwood.data.write.compact import Compacted, compact
    from sapwood.data.write.convert import Converted, convert

__all__ = [
    "Batch",
    "Compacted",
    "Converted",
    "Fingerprint",
    "Index",
    "LmdbReader",
    "LmdbRecords",
    "Provenance",
    "ReadStats",
    "Reading",
    "Reuse",
    "Stagger",
    "build_index",
    "compact",
    "convert",
    "index_file",
    "list_databases",
    "load_index",
    "open_index",
    "read_about",
    "readings_of",
    "save_index",
    "skew_of",
]

_ELSEWHERE = {
    "Compacted": "sapwood.data.write.compact",
    "Converted": "sapwood.data.write.convert",
    "LmdbReader": "sapwood.data.reader",
    "LmdbRecords": "sapwood.data.records",
    "Stagger": "sapwood.data.stagger",
    "compact": "sapwood.data.write.compact",
    "convert": "sapwood.data.write.convert",
    "read_about": "sapwood.data.write.about",
}


def __getattr__(name: str) -> Any:
    if name not in _ELSEWHERE:
        raise AttributeError(f"module 'sapwood.data' has no attribute {name!r}")
    return getattr(import_module(_ELSEWHERE[name]), name)
