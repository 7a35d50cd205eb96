"""What the contenders of the data benchmarks need: modules, packages and files."""

from __future__ import annotations

from collections.abc import Sequence

FORMAT_OF = {
    "webdataset": "tar",
    "spdl": "tar",
    "litdata": "litdata",
    "grain": "array_record",
}
"""All others read the LMDB file."""
OURS = (
    *("sapwood", "sapwood ring", "auto", "auto, shared"),
    *("lmdb", "lmm", "lmm-dm", "dio", "prov", "coal", "stag"),
)
UNCHECKED = ("raw disk", "page cache")
STEADY = ("py-lmdb no readahead", "py-lmdb 2 workers no readahead")
"""They do not get faster while the page cache fills, so that short turns say as much."""
SHARDS = tuple(FORMAT_OF)
PACKAGES = {
    "webdataset": "webdataset",
    "spdl": "spdl.pipeline",
    "litdata": "litdata",
    "grain": "grain",
    "torchdata": "torchdata.nodes",
}


def format_of(name: str) -> str:
    return FORMAT_OF.get(name, "lmdb")


def module_of(name: str) -> str:
    if name in OURS:
        return "data_ours"
    if name in UNCHECKED:
        return "data_limits"
    return "data_shards" if name in SHARDS else "data_lmdb"


def modules_of(names: Sequence[str]) -> list[str]:
    return sorted({module_of(name) for name in names})


def packages_of(names: Sequence[str]) -> list[str]:
    return sorted({PACKAGES[name] for name in names if name in PACKAGES})
