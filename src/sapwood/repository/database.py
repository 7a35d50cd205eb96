"""The connection to a catalog: SQLite in WAL mode, used by any number of threads and processes."""

from __future__ import annotations

import os
import sqlite3
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from sapwood.errors import Damaged, StoreError
from sapwood.repository.schema import SCHEMA, SCHEMA_VERSION
from sapwood.runtime import faults

__all__ = ["Database"]

_PATIENCE = 60.0
"""Seconds to wait for another process that writes."""


class Database:
    """One SQLite file. Owns its connection, which a forked process opens anew."""

    def __init__(self, path: Path | None, *, wal: bool = True) -> None:
        """Open the file, or make it; None is memory. ``wal`` needs a file system of this machine.

        Raises:
            StoreError: it cannot be opened, or is of another version.
        """
        self._path, self._wal = path, wal
        self._lock = threading.RLock()
        self._pid = -1
        self._connection: sqlite3.Connection | None = None
        self._closed = False
        with self._lock, _as_store_errors(path):
            self._prepare(self._open())

    @contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        """One consistent view; nothing is written."""
        with self._lock, _as_store_errors(self._path):
            connection = self._open()
            connection.execute("BEGIN")
            try:
                yield connection
            finally:
                with suppress(sqlite3.Error):
                    connection.execute("ROLLBACK")

    @contextmanager
    def writing(self, *, synced: bool = False) -> Iterator[sqlite3.Connection]:
        """A transaction: all of it happens, or nothing.

        ``synced``: when it is over it would survive a power failure.
        """
        with self._lock, _as_store_errors(self._path):
            connection = self._open()
            if synced:
                connection.execute("PRAGMA synchronous=FULL")
            try:
                connection.execute("BEGIN IMMEDIATE")
                try:
                    yield connection
                    faults.point("catalog", op="commit")
                    connection.execute("COMMIT")
                    faults.point("catalog", op="committed")
                except BaseException:
                    with suppress(sqlite3.Error):
                        connection.execute("ROLLBACK")
                    raise
            finally:
                if synced:
                    connection.execute("PRAGMA synchronous=NORMAL")

    def close(self) -> None:
        """Close; calling it again does nothing."""
        with self._lock:
            self._closed = True
            if self._connection is not None and self._pid == os.getpid():
                self._connection.close()
            self._connection = None

    def _open(self) -> sqlite3.Connection:
        if self._closed:
            raise StoreError("the repository was closed; open it again")
        if self._connection is not None and self._pid != os.getpid() and self._path is None:
            raise StoreError("a repository in memory ends with its process; a fork has none of it")
        if self._connection is None or self._pid != os.getpid():
            # A connection must not cross a fork: the child would share the parent's locks.
            self._connection = sqlite3.connect(
                self._path or ":memory:",
                timeout=_PATIENCE,
                isolation_level=None,
                check_same_thread=False,
            )
            self._pid = os.getpid()
            self._connection.execute(f"PRAGMA journal_mode={'WAL' if self._wal else 'DELETE'}")
            self._connection.execute(f"PRAGMA synchronous={'NORMAL' if self._wal else 'FULL'}")
            self._connection.execute("PRAGMA foreign_keys=ON")
            self._connection.execute("PRAGMA trusted_schema=OFF")
        return self._connection

    def _prepare(self, connection: sqlite3.Connection) -> None:
        if self._version(connection) == 0:
            connection.execute("BEGIN IMMEDIATE")
            try:
                if self._version(connection) == 0:  # nobody else was quicker
                    for statement in SCHEMA.split(";\n"):
                        connection.execute(statement)
                    connection.execute(f"PRAGMA user_version={SCHEMA_VERSION}")
                connection.execute("COMMIT")
            except BaseException:
                with suppress(sqlite3.Error):
                    connection.execute("ROLLBACK")
                raise
        found = self._version(connection)
        if found != SCHEMA_VERSION:
            raise StoreError(
                f"{self._path} is a catalog of version {found}, this Sapwood knows version "
                f"{SCHEMA_VERSION}: use the version of Sapwood that made it, or a newer one"
            )

    @staticmethod
    def _version(connection: sqlite3.Connection) -> int:
        return int(connection.execute("PRAGMA user_version").fetchone()[0])


def one(connection: sqlite3.Connection, statement: str, values: Sequence[Any] = ()) -> Any:
    """The first row, or None."""
    return connection.execute(statement, values).fetchone()


@contextmanager
def _as_store_errors(path: Path | None) -> Iterator[None]:
    try:
        yield
    except sqlite3.DatabaseError as error:
        text = str(error)
        if "malformed" in text or "not a database" in text:
            raise Damaged(f"the catalog {path} is damaged: {text}") from error
        if "locked" in text or "busy" in text:
            raise StoreError(
                f"another process has been writing to {path} for {_PATIENCE:g} s; end it, or try "
                "again"
            ) from error
        if "full" in text:
            raise StoreError(f"no room for the catalog {path}: {text}; make room") from error
        raise StoreError(f"the catalog {path}: {text}") from error
