"""Appending records to a new LMDB file, through py-lmdb."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sapwood.data.write.base import MAIN, load_lmdb
from sapwood.data.write.draft import cannot_write
from sapwood.errors import DataError
from sapwood.runtime import faults

__all__ = ["COMMIT_BYTES", "Writer", "key_of"]

COMMIT_BYTES = 64 * 2**20
"""LMDB keeps what a transaction writes in memory, so that a transaction must not grow with the
file."""
_SPARE = 4 * 2**20
"""Room in the map for the pages between the records and the root, which each commit writes anew."""
_LONGEST = 2**32 - 1
_NODE = 64


def key_of(number: int) -> bytes:
    """The key of a record: numbers of one length, so that the order of keys is that of writing."""
    return b"%010d" % number


class Writer:
    """Records, written in the order of keys, so that the file has them one after the other.

    The map is not written to (``writemap``): a full disk would end the process, and not with an
    error.
    """

    def __init__(self, draft: Path, dest: Path, databases: Sequence[str]) -> None:
        """``draft`` is an empty file; errors are about ``dest``, which it will be.

        Raises:
            ConfigError: py-lmdb is missing.
            DataError: it cannot be written.
        """
        self._lmdb, self._dest = load_lmdb("writing a database"), dest
        self._env = self._lmdb.open(
            str(draft),
            subdir=False,
            lock=False,
            sync=False,  # once, at the end
            map_size=COMMIT_BYTES + 2 * _SPARE,
            max_dbs=len(databases) + 1,
        )
        self._page: int = self._env.stat()["psize"]
        self._txn: Any = None
        self._pending = 0
        self.records = 0
        self.nbytes = 0
        """Bytes of values."""
        self._dbs = [self._open(name) for name in databases]

    def _open(self, name: str) -> Any:
        return None if name == MAIN else self._env.open_db(name.encode())

    def put(self, values: Sequence[bytes]) -> None:
        """Write one record: a value for each database, all under one key.

        Raises:
            DataError: it cannot be written, or a value is too long.
        """
        key = key_of(self.records)
        faults.point("data.convert", record=self.records, path=self._dest)
        try:
            self._make_room(sum(map(self._cost, values)))
            for db, value in zip(self._dbs, values, strict=True):
                self._txn.put(key, value, db=db, append=True)
                self.nbytes += len(value)
        except (self._lmdb.Error, OSError) as error:
            raise cannot_write(self._dest, error) from error
        self.records += 1

    def finish(self, database: str, key: bytes, value: bytes) -> None:
        """Write one more record, alone in a database, and see everything onto the device.

        Raises:
            DataError: it cannot be written.
        """
        try:
            self._commit()
            db = self._env.open_db(database.encode())
            self._make_room(self._cost(value))
            self._txn.put(key, value, db=db)
            self._commit()
            self._env.sync(True)
        except (self._lmdb.Error, OSError) as error:
            raise cannot_write(self._dest, error) from error

    def close(self) -> None:
        """Close the file; what was not committed is not in it."""
        if self._txn is not None:
            self._txn.abort()
            self._txn = None
        self._env.close()

    def __enter__(self) -> Writer:
        """Close at the end of a ``with`` block."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close."""
        self.close()

    def _cost(self, value: bytes) -> int:
        """Bytes of the file that a value needs at most."""
        length = len(value)
        if length > _LONGEST:
            raise DataError(f"record {self.records} has {length} bytes; LMDB takes {_LONGEST}")
        if length + _NODE < self._page // 2:
            return 2 * (length + _NODE)  # pages of a tree are half full at least
        return (length // self._page + 2) * self._page + 2 * _NODE

    def _make_room(self, cost: int) -> None:
        if self._txn is not None and self._pending + cost > COMMIT_BYTES:
            self._commit()
        if self._txn is None:
            used = (self._env.info()["last_pgno"] + 1) * self._page
            needed, room = used + max(COMMIT_BYTES, cost) + _SPARE, self._env.info()["map_size"]
            if needed > room:
                size = max(needed, 2 * room)
                self._env.set_mapsize(-(-size // self._page) * self._page)
            self._txn = self._env.begin(write=True)
        self._pending += cost

    def _commit(self) -> None:
        if self._txn is not None:
            txn, self._txn, self._pending = self._txn, None, 0
            txn.commit()
