"""Finding all records of an LMDB file whose pages are not in memory."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from . import data_cold

TIMES = 3


def ours(path: Path) -> int:
    from sapwood.data import build_index

    return len(build_index(path))


def cursor(path: Path) -> int:
    import lmdb

    with (
        lmdb.open(str(path), subdir=False, readonly=True, lock=False) as env,
        env.begin() as txn,
        txn.cursor() as cursor,
    ):
        return sum(1 for _ in cursor.iternext(keys=True, values=False))


WAYS: dict[str, Callable[[Path], int]] = {"sapwood": ours, "py-lmdb": cursor}


def index_seconds(folder: Path) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {name: [] for name in WAYS}
    path = folder / "data.mdb"
    for way in WAYS.values():
        way(path)  # imports
    for _ in range(TIMES):
        for name, way in WAYS.items():
            data_cold.drop(folder)
            begun = time.perf_counter()
            way(path)
            found[name].append(time.perf_counter() - begun)
    return found
