"""What the logs of a repository say, as tables in this process's memory.

It is a cache: built from objects that never change, and validated by looking whether there are
newer ones. The tables are those of a catalog, so that queries are the same for all back ends.
"""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sapwood.errors import Damaged, ModelExists
from sapwood.repository.base import ModelRecord, NewModel
from sapwood.repository.catalog import Catalog
from sapwood.repository.database import Database, one
from sapwood.repository.names import Reference, new_id

__all__ = ["Event", "Saved", "View", "save_event"]

Event = dict[str, Any]
"""An entry of a log: ``op`` is ``save``, ``remove``, ``tag`` or ``untag``."""


@dataclass(frozen=True, slots=True)
class Saved:
    """Where the objects of a version are."""

    name: str
    version: str
    head: str
    layers: str | None
    pack: str | None
    """The one that was written with it."""


class View(Catalog):
    """The tables. Thread-safe; not to be used in a forked process."""

    def __init__(self) -> None:
        """Empty."""
        self._tables = Database(None)
        super().__init__(self._tables)
        self.saved: dict[int, Saved] = {}
        """Every version there ever was, by number."""
        self.indexed: set[int] = set()
        """Versions whose layers are in the tables."""

    def close(self) -> None:
        """Give back the memory."""
        self._tables.close()

    # -- what is to be appended --------------------------------------------------------------

    def to_save(self, model: NewModel) -> tuple[int, str]:
        """The number and the version it would get now.

        Raises:
            ModelExists: it is there, or a tag of that name is.
        """
        with self._tables.reading() as db:
            version = self._free_version(db, model)
            for tag in model.tags:
                if tag == version:
                    raise ModelExists(f"{tag!r} cannot be both a version and a tag")
                self._refuse_tag(db, model.name, tag)
            last = one(db, "SELECT coalesce(max(id), 0) FROM model")[0]
            return model.id if model.id is not None else new_id(last), version

    def to_tag(self, reference: Reference, tag: str) -> Event:
        """The event that makes a tag point to a version.

        Raises:
            ModelNotFound: there is no such version.
            ModelExists: there is a version of that name.
        """
        with self._tables.reading() as db:
            row = self._find(db, reference)
            self._refuse_tag(db, reference.name, tag)
            return {"op": "tag", "tag": tag, "id": row["id"]}

    def has_tag(self, name: str, tag: str) -> bool:
        """Whether there is such a tag."""
        with self._tables.reading() as db:
            query = "SELECT 1 FROM tag WHERE name = ? AND tag = ?"
            return one(db, query, (name, tag)) is not None

    def has_name(self, name: str) -> bool:
        """Whether a model of that name has any version."""
        with self._tables.reading() as db:
            query = "SELECT 1 FROM model WHERE name = ? AND removed IS NULL"
            return one(db, query, (name,)) is not None

    def live(self) -> list[int]:
        """The numbers of all versions that were not removed."""
        with self._tables.reading() as db:
            return [row[0] for row in db.execute("SELECT id FROM model WHERE removed IS NULL")]

    def is_live(self, id: int) -> bool:
        """Whether a version is there."""
        with self._tables.reading() as db:
            query = "SELECT 1 FROM model WHERE id = ? AND removed IS NULL"
            return one(db, query, (id,)) is not None

    def record(self, id: int) -> ModelRecord:
        """A version that is known."""
        return self.by_id(id, self.saved[id].name)

    def _refuse_tag(self, db: sqlite3.Connection, name: str, tag: str) -> None:
        query = "SELECT 1 FROM model WHERE name = ? AND version = ? AND removed IS NULL"
        if one(db, query, (name, tag)) is not None:
            raise ModelExists(f"{tag!r} is a version of {name} and cannot be a tag as well")

    # -- what was appended -------------------------------------------------------------------

    def apply(self, name: str, event: Mapping[str, Any], key: str) -> None:
        """Take over an event, which comes after all earlier ones of its model.

        Raises:
            Damaged: it makes no sense; names its key.
        """
        try:
            with self._tables.writing() as db:
                _APPLY[event["op"]](self, db, name, event)
        except (KeyError, TypeError, ValueError) as error:
            raise Damaged(f"{key} is damaged: {error!r}") from error

    def index(self, id: int, layers: Mapping[bytes, int]) -> None:
        """Take over the layers of a version, unless it was removed meanwhile."""
        with self._tables.writing() as db:
            if one(db, "SELECT 1 FROM model WHERE id = ? AND removed IS NULL", (id,)):
                rows = [(layer, id, nbytes) for layer, nbytes in layers.items()]
                db.executemany("INSERT OR IGNORE INTO layer VALUES (?, ?, ?)", rows)
                self.indexed.add(id)

    def add_configs(self, configs: Mapping[bytes, bytes]) -> None:
        """Take over configurations of layers."""
        if configs:
            with self._tables.writing() as db:
                db.executemany("INSERT OR IGNORE INTO config VALUES (?, ?)", configs.items())

    def _save(self, db: sqlite3.Connection, name: str, event: Mapping[str, Any]) -> None:
        id = int(event["id"])
        columns = ("created", "parent", "parent_name", "nbytes", "tensors")
        db.execute(
            "INSERT INTO model (id, name, version, created, parent, parent_name, nbytes, tensors,"
            " note) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (id, name, event["version"], *map(event.get, columns), json.dumps(event["note"])),
        )
        metrics = [(id, key, float(value)) for key, value in event["metrics"].items()]
        db.executemany("INSERT INTO metric VALUES (?, ?, ?)", metrics)
        for tag in event["tags"]:
            self._tag(db, name, tag, id)
        self.saved[id] = Saved(
            name, event["version"], event["head"], event["layers"], event["pack"]
        )

    def _remove(self, db: sqlite3.Connection, name: str, event: Mapping[str, Any]) -> None:
        id = int(event["id"])
        db.execute("UPDATE model SET removed = ? WHERE id = ?", (float(event["time"]), id))
        db.execute("DELETE FROM tag WHERE model = ?", (id,))
        db.execute("DELETE FROM layer WHERE model = ?", (id,))
        self.indexed.discard(id)

    def _point(self, db: sqlite3.Connection, name: str, event: Mapping[str, Any]) -> None:
        self._tag(db, name, event["tag"], int(event["id"]))

    def _unpoint(self, db: sqlite3.Connection, name: str, event: Mapping[str, Any]) -> None:
        db.execute("DELETE FROM tag WHERE name = ? AND tag = ?", (name, event["tag"]))


_APPLY = {"save": View._save, "remove": View._remove, "tag": View._point, "untag": View._unpoint}


def save_event(
    model: NewModel, id: int, version: str, *, head: str, layers: str | None, pack: str | None
) -> Event:
    """The event of a save."""
    return {
        "op": "save",
        "id": id,
        "version": version,
        "created": time.time(),
        "parent": model.parent,
        "parent_name": model.parent_name,
        "nbytes": model.manifest.nbytes,
        "tensors": len(model.manifest.names),
        "note": dict(model.note),
        "metrics": dict(model.metrics),
        "tags": list(model.tags),
        "head": head,
        "layers": layers,
        "pack": pack,
    }
