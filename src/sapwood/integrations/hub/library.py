"""The versions of a repository as a hub's clients ask for them: by id, revision and file."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass

from sapwood.errors import BadName, ModelNotFound, StoreError
from sapwood.integrations.hub.names import commit_of, hub_id
from sapwood.repository.base import ModelRecord
from sapwood.store import Repository
from sapwood.store.exchange import OutFile, as_folder

__all__ = ["LATEST", "Library", "NoFile", "NoFiles", "NoModel", "NoRevision", "Version"]

LATEST = "main"
NAMESPACE = "sapwood"
"""Where models of one name can be had too: ``sapwood/bert`` is ``bert``."""
_OPEN = 32
"""Versions whose files are known at once; a client asks for many ranges of one."""
_COMMITS = 10_000
_NAMES_SECONDS = 2.0
"""How long the list of all names is used again, that an unknown id makes necessary."""


class NoModel(Exception):
    """There is no model of that id."""


class NoRevision(Exception):
    """The model has no such version, tag or commit."""


class NoFiles(Exception):
    """The version cannot be given out as files: the format cannot hold its tensors."""


class NoFile(Exception):
    """The version has no such file."""

    def __init__(self, message: str, commit: str) -> None:
        """``commit`` lets a client remember that the file is not there."""
        super().__init__(message)
        self.commit = commit


@dataclass(frozen=True, kw_only=True)
class Version:
    """One version, with the files it is given out as."""

    record: ModelRecord
    commit: str
    files: Mapping[str, OutFile]

    def file(self, path: str) -> OutFile:
        """One of its files.

        Raises:
            NoFile: there is none.
        """
        found = self.files.get(path)
        if found is None:
            raise NoFile(f"{self.record.reference} has no file {path!r}", self.commit)
        return found


class Library:
    """Looks things up in a repository, which stays the caller's to close. For several threads."""

    def __init__(self, repo: Repository) -> None:
        """Nothing is read yet."""
        self._repo = repo
        self._lock = threading.Lock()
        self._open: OrderedDict[int, Version] = OrderedDict()
        self._commits: OrderedDict[tuple[str, str], str] = OrderedDict()
        self._names: tuple[float, dict[str, list[str]]] = (0.0, {})

    def version(self, id: str, revision: str = LATEST) -> Version:
        """A version of a model: by version, tag, commit, or ``main`` for the latest one.

        Raises:
            NoModel, NoRevision: there is none.
            NoFiles: it cannot be given out as files.
            SapwoodError: the repository cannot be read.
        """
        record = self._record(self.name_of(id), revision)
        with self._lock:
            found = self._open.pop(record.id, None)
        if found is None:
            found = self._opened(record)
        with self._lock:
            self._open[found.record.id] = found
            self._commits[found.record.name, found.commit] = found.record.version
            while len(self._open) > _OPEN:
                self._open.popitem(last=False)
            while len(self._commits) > _COMMITS:
                self._commits.popitem(last=False)
        return found

    def _opened(self, record: ModelRecord) -> Version:
        stored = self._repo.open(str(record.reference))
        try:
            files = as_folder(stored)
        except StoreError as error:
            raise NoFiles(str(error)) from error
        return Version(record=stored.record, commit=commit_of(stored.record), files=files)

    def records(self, id: str) -> list[ModelRecord]:
        """Every version of a model, oldest first.

        Raises:
            NoModel: there is none.
        """
        return self._repo.models(self.name_of(id))

    def latest(self) -> dict[str, ModelRecord]:
        """The latest version of every model, by id; of names that share an id, the first one's."""
        found: dict[str, ModelRecord] = {}
        for record in self._repo.models():
            id = hub_id(record.name)
            if id not in found or found[id].name == record.name:
                found[id] = record
        return found

    def name_of(self, id: str) -> str:
        """The name of the model of an id.

        Raises:
            NoModel: there is none, or several have it.
        """
        try:
            return self._repo.info(id).name
        except (BadName, ModelNotFound):
            pass
        names = self._ids().get(id, [])
        if len(names) == 1:
            return names[0]
        if names:
            raise NoModel(f"{id} is ambiguous: {' and '.join(names)} have this id")
        raise NoModel(f"there is no model {id}")

    # -- looking up --------------------------------------------------------------------------

    def _ids(self) -> Mapping[str, list[str]]:
        since, known = self._names
        if time.monotonic() - since < _NAMES_SECONDS:
            return known
        known = {}
        for name in sorted({record.name for record in self._repo.models()}):
            id = hub_id(name)
            known.setdefault(id, []).append(name)
            if "/" not in id:  # some clients take only ids of two parts
                known.setdefault(f"{NAMESPACE}/{id}", []).append(name)
        self._names = (time.monotonic(), known)
        return known

    def _record(self, name: str, revision: str) -> ModelRecord:
        try:
            return self._repo.info(f"{name}@{revision}")
        except (BadName, ModelNotFound):
            pass
        found = self._latest(name) if revision == LATEST else self._of_commit(name, revision)
        if found is None:
            raise NoRevision(f"{name} has no version, tag or commit {revision}")
        return found

    def _latest(self, name: str) -> ModelRecord | None:
        try:
            return self._repo.info(name)
        except ModelNotFound:
            return None

    def _of_commit(self, name: str, commit: str) -> ModelRecord | None:
        known = self._commits.get((name, commit))
        if known is not None:
            try:
                found = self._repo.info(f"{name}@{known}")
            except ModelNotFound:
                return None
            # It may have been removed, and another one saved under its name.
            return found if commit_of(found) == commit else None
        if len(commit) != 40:
            return None
        records = self._repo.models(name)
        return next((one for one in records if commit_of(one) == commit), None)
