"""The donors' side: a run that lets itself be cloned, as often as somebody asks.

Rank 0 answers at the door and tells the other ranks through the group's store; each fork is then
served by each rank on its own (``serving``). No rank ever waits for another one here.
"""

from __future__ import annotations

import json
import logging
import secrets
import threading
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from sapwood.clone.departure import LEAD, Departure
from sapwood.clone.door import Door, Request
from sapwood.clone.extras import CloneExtras
from sapwood.clone.manifest import APPROACHES, versions
from sapwood.clone.places import Places
from sapwood.clone.report import ForkReport
from sapwood.clone.serving import OWNER, Serving
from sapwood.clone.session import Session, dial
from sapwood.clone.settings import CloneSettings
from sapwood.errors import CloneError, SapwoodError
from sapwood.events import StepEnded, TensorUpdated
from sapwood.runtime.handle import RunHandle
from sapwood.runtime.host import own_host
from sapwood.runtime.stores import Store, TCPStore

__all__ = ["Donor"]

log = logging.getLogger(__name__)
_POLL = 0.5
_ANSWER = 30.0


class Donor:
    """Serves forks of a run until closed; one on each rank."""

    def __init__(self, run: RunHandle, settings: CloneSettings, extras: CloneExtras) -> None:
        """Open the door; nothing happens until somebody asks."""
        self._run, self._settings, self._extras = run, settings, extras
        self._closed = threading.Event()
        self._sessions: list[Serving] = []
        self._departures: dict[str, Departure] = {}
        self._reports: list[ForkReport] = []
        self._lock = threading.Lock()
        self._store, self._place = self._share_store()
        self._places = Places.gather(run.group, run.model)
        self._prefix = f"clone/{run.group.share_text('clone key', secrets.token_hex(4))}"
        self._asked = 0
        self._door: Door | None = None
        if run.group.rank == 0:
            self._door = Door(run.folder, self._place[0], self._answer)
        self._subscriptions = [
            run.events.subscribe(TensorUpdated, self._updated, name=OWNER),
            run.events.subscribe(StepEnded, self._step_ended, name=OWNER),
        ]
        self._thread = threading.Thread(target=self._watch, name="sapwood-forks", daemon=True)
        self._thread.start()

    @property
    def reports(self) -> list[ForkReport]:
        """Every fork that was asked for."""
        with self._lock:
            return list(self._reports)

    def close(self) -> None:
        """End what is under way and let nobody in any more."""
        self._closed.set()
        if self._door is not None:
            self._door.close()
        for subscription in self._subscriptions:
            subscription.cancel()
        with self._lock:
            sessions = list(self._sessions)
        for serving in sessions:
            if not serving.over.is_set():
                serving.last_words("the run has ended")
            serving.join(5.0)
        self._thread.join(5.0)

    def start_standbys(self) -> int:
        """Let clones that stand by begin; how many groups. What rank 0 does counts."""
        return sum([serving.go() for serving in self._sessions])

    # -- events ------------------------------------------------------------------------------

    def _updated(self, event: TensorUpdated) -> None:
        for serving in self._sessions:
            serving.updated(event)

    def _step_ended(self, event: StepEnded) -> None:
        if self._run.group.rank == 0:
            for departure in {serving.departure for serving in self._sessions}:
                departure.settle(event.step)
        for serving in self._sessions:
            serving.step_ended(event.step)

    # -- being asked -------------------------------------------------------------------------

    def _answer(self, request: Request) -> dict[str, Any]:
        """Let a group in, or say why not; on a thread of the door."""
        if request.get("op") == "go":
            return {"started": self.start_standbys()}
        if request.get("op") == "give up":
            self._departure(_together(request["together"]), None).give_up(str(request["why"]))
            return {}
        mine, theirs = versions(), request["versions"]
        if mine != theirs:
            raise CloneError(f"the run has {_said(mine)}, the clones {_said(theirs)}")
        places = Places.from_json(request["places"]).to_json()
        approach = str(request.get("approach") or self._settings.approach)
        if not places or approach not in APPROACHES:
            raise CloneError(f"{len(places)} clones by {approach!r} is nothing that can be done")
        asked = {
            "session": secrets.token_hex(16),
            "places": places,
            "approach": approach,
            "transport": str(request.get("transport") or self._settings.transport),
            "standby": bool(request.get("standby")),
            "at_step": self._check_step(request.get("at_step")),
            "together": _together(request.get("together")),
        }
        with self._lock:
            self._asked += 1
            number = self._asked
        self._run.group.store.set(f"{self._prefix}/{number}", json.dumps(asked))
        host, port = self._place
        return {"session": asked["session"], "run": self._run.id, "host": host, "port": port}

    def _check_step(self, step: Any) -> int | None:
        if step is None:
            return None
        ended = self._run.step_count
        if int(step) < ended + LEAD:
            raise CloneError(
                f"step {step} cannot be forked any more: the run has ended step {ended}; choose a "
                "later one"
            )
        return int(step)

    def _departure(self, together: Sequence[Any] | None, at_step: int | None) -> Departure:
        """The one that forks of the same name share, or a new one."""
        if together is None:
            return Departure(at_step=at_step)
        name, count = together
        with self._lock:
            return self._departures.setdefault(name, Departure(count=count, at_step=at_step))

    def _watch(self) -> None:
        """Serve what rank 0 announces."""
        number = 1
        store = self._run.group.store
        while not self._closed.is_set():
            try:
                if not store.wait(f"{self._prefix}/{number}", _POLL):
                    continue
                self._begin(json.loads(store.get(f"{self._prefix}/{number}")))
                number += 1
            except (SapwoodError, RuntimeError) as error:
                if not self._closed.is_set():
                    log.info("no more forks, the group is gone: %s", error)
                return

    def _begin(self, asked: dict[str, Any]) -> None:
        session = Session(self._store, asked["session"], timeout=_ANSWER)
        departure = self._departure(asked["together"], asked["at_step"])
        serving = Serving(
            self._run, self._settings, session, self._places, asked, self._extras, departure
        )
        with self._lock:
            self._reports.append(serving.report)
            self._sessions = [*(s for s in self._sessions if not s.over.is_set()), serving]

    def _share_store(self) -> tuple[Store, tuple[str, int]]:
        """A store both sides can reach, hosted by rank 0: it outlives no fork and no run."""
        group = self._run.group
        host = self._settings.host or own_host()
        store: Store | None = None
        text = ""
        if group.rank == 0:
            hosted = TCPStore(
                "localhost",  # it listens everywhere nevertheless
                0,
                is_master=True,
                timeout=timedelta(seconds=_ANSWER),
                wait_for_workers=False,
            )
            store, text = hosted, json.dumps([host, hosted.port])
        place = json.loads(group.share_text("clone store", text))
        if store is None:
            store = dial(place[0], place[1], _ANSWER)
        return store, (place[0], place[1])


def _together(asked: Any) -> tuple[str, int] | None:
    """A name that forks share, and how many do.

    Raises:
        CloneError: it is not that.
    """
    if asked is None:
        return None
    name, count = asked
    if not isinstance(name, str) or not isinstance(count, int) or count < 1:
        raise CloneError(f"{asked!r} says neither which forks begin together nor how many")
    return name, count


def _said(found: Any) -> str:
    return " and ".join(f"{name} {version}" for name, version in dict(found).items())
