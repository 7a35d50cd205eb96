"""How many versions share each tensor, counted in the background.

A manifest names the runs of bytes of one version. Which of them are equal the repository says, once
it has compared them. Both never change afterwards, so each is asked for once.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from sapwood.errors import ModelNotFound, SapwoodError
from sapwood.report.store.versions import Versions
from sapwood.repository.base import NOTHING, ModelRecord
from sapwood.repository.manifest import Manifest
from sapwood.store import Repository

__all__ = ["Counted", "Sharing"]

log = logging.getLogger(__name__)
_Ints = npt.NDArray[np.int64]
_EVERY = 2.0
_BATCH = 500
_SHOW = 1.0
"""Seconds between two counts while versions are being read."""
_END = 10.0
_NONE: _Ints = np.empty(0, np.int64)


@dataclass(frozen=True, kw_only=True)
class Counted:
    """What is known by now; a later one takes its place."""

    versions: int = 0
    total: int = 0
    supported: bool = True
    """Whether the repository can say which tensors are equal."""
    complete: bool = False
    open: int = 0
    """Tensors whose bytes the repository has not compared yet."""
    shares: Mapping[int, float] = field(default_factory=dict)
    """Of each version's bytes, how many others have, too."""
    canonical: Mapping[int, int] = field(default_factory=dict)
    blobs: _Ints = field(default_factory=lambda: _NONE)
    counts: _Ints = field(default_factory=lambda: _NONE)

    def others(self, id: int, blob: int) -> int | None:
        """How many versions beside this one have these bytes; None if that is not known yet."""
        stands = self.canonical.get(blob)
        if stands is None or id not in self.shares:
            return None
        at = int(np.searchsorted(self.blobs, stands))
        return int(self.counts[at]) - 1

    def plain(self) -> dict[str, Any]:
        """As the page gets it."""
        return {
            "supported": self.supported,
            "versions": self.versions,
            "total": self.total,
            "complete": self.complete,
            "open": self.open,
        }


class Sharing:
    """Counts in a thread of its own; ``close`` ends it."""

    def __init__(self, repo: Repository, versions: Versions) -> None:
        """Nothing is read before ``wake``."""
        self._repo, self._versions = repo, versions
        self._known: dict[int, tuple[_Ints, _Ints]] = {}
        self._canonical: dict[int, int] = {}
        self._unsettled: set[int] = set()
        self._wanted = threading.Event()
        self._closed = threading.Event()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._next = 0.0
        self.counted = Counted()

    def wake(self) -> Counted:
        """Somebody looks at it: what is known by now, while the rest is being read."""
        with self._lock:
            if not self._closed.is_set() and time.monotonic() >= self._next:
                self._wanted.set()
                if self._thread is None:
                    self._thread = threading.Thread(target=self._run, name="sapwood-sharing")
                    self._thread.start()
        return self.counted

    def close(self) -> None:
        """End between two versions. Calling it again does nothing."""
        with self._lock:
            self._closed.set()
            self._wanted.set()
        if self._thread is not None:
            self._thread.join(_END)

    def _run(self) -> None:
        while not self._closed.is_set():
            self._wanted.wait()
            try:
                self._refresh()
            except SapwoodError as error:
                log.warning("what versions share is not known for now: %s", error)
            with self._lock:
                if not self._closed.is_set():
                    self._wanted.clear()
                self._next = time.monotonic() + _EVERY

    def _refresh(self) -> None:
        if self._repo.canonical([]) is None:
            self.counted = Counted(supported=False, complete=True)
            return
        records = {record.id: record for record in self._versions.all()}
        changed = False
        for gone in self._known.keys() - records.keys():
            del self._known[gone]
            changed = True
        todo = [record for id, record in records.items() if id not in self._known]
        due = time.monotonic() + _SHOW
        for start in range(0, len(todo), _BATCH):
            self._read(todo[start : start + _BATCH])
            if self._closed.is_set():
                return
            if time.monotonic() >= due:
                self._count(len(records), complete=False)
                due = time.monotonic() + _SHOW
        if self._settle() or changed or not self.counted.complete or todo:
            self._count(len(records), complete=True)

    def _read(self, records: Sequence[ModelRecord]) -> None:
        for record in records:
            if self._closed.is_set():
                return
            try:
                stored = self._repo.open(str(record.reference))
            except ModelNotFound:
                continue  # removed meanwhile
            self._known[stored.record.id] = found = _blobs_of(stored.manifest)
            self._unsettled.update(found[0].tolist())
        self._unsettled -= self._canonical.keys()
        self._settle()

    def _settle(self) -> bool:
        """Ask for what was not compared before; whether there is something new."""
        found = self._repo.canonical(sorted(self._unsettled)) or {}
        new = {blob: stands for blob, stands in found.items() if stands is not None}
        # What was removed is not in the answer, and need not be asked for again.
        self._unsettled = {blob for blob, stands in found.items() if stands is None}
        self._canonical = self._canonical | new if new else self._canonical
        return bool(new)

    def _count(self, total: int, *, complete: bool) -> None:
        ids = list(self._known)
        which = np.repeat(np.arange(len(ids)), [len(self._known[id][0]) for id in ids])
        raw = np.concatenate([_NONE, *(self._known[id][0] for id in ids)])
        sizes = np.concatenate([_NONE, *(self._known[id][1] for id in ids)])
        distinct, inverse = np.unique(raw, return_inverse=True)
        # What was not compared yet is known to be only what it is itself.
        stands = np.array([self._canonical.get(b, b) for b in distinct.tolist()], np.int64)
        blobs, place = np.unique(stands, return_inverse=True)
        place = place[inverse]
        pairs, first = np.unique(which * max(1, len(blobs)) + place, return_index=True)
        counts = np.bincount(pairs % max(1, len(blobs)), minlength=len(blobs))
        which, sizes, place = which[first], sizes[first], place[first]
        every = np.bincount(which, sizes, len(ids))
        common = np.bincount(which, sizes * (counts[place] > 1), len(ids))
        shares = common / np.maximum(every, 1)
        self.counted = Counted(
            versions=len(ids),
            total=total,
            complete=complete,
            open=len(self._unsettled),
            shares=dict(zip(ids, shares.tolist(), strict=True)),
            canonical=self._canonical,
            blobs=blobs,
            counts=counts,
        )


def _blobs_of(manifest: Manifest) -> tuple[_Ints, _Ints]:
    """Each run of bytes once, with its size."""
    found = dict(zip(manifest.blobs, manifest.sizes, strict=True))
    found.pop(NOTHING, None)
    return np.array(list(found), np.int64), np.array(list(found.values()), np.int64)
