"""The donors' side: a run that lets itself be cloned, as often as somebody asks.

Rank 0 listens, and announces each fork on its board; each fork is then served by each rank on its
own (``serving``). No rank ever waits for another one here.
"""

from __future__ import annotations

import json
import logging
import secrets
import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from sapwood.clone.address import Address
from sapwood.clone.board import Board
from sapwood.clone.departure import LEAD, Departure
from sapwood.clone.extras import CloneExtras
from sapwood.clone.listener import ForkListener, Request
from sapwood.clone.manifest import APPROACHES, versions
from sapwood.clone.places import Places
from sapwood.clone.remote import BoardAccess, RemoteBoard
from sapwood.clone.report import ForkReport
from sapwood.clone.serving import OWNER, Serving
from sapwood.clone.session import Session, prefix_of
from sapwood.clone.settings import CloneSettings
from sapwood.errors import CloneError, ConfigError
from sapwood.events import StepEnded, TensorUpdated
from sapwood.runtime.group import Group
from sapwood.runtime.handle import RunHandle
from sapwood.runtime.host import Hosts, find_hosts, own_address

__all__ = ["Donor"]

log = logging.getLogger(__name__)
_ANSWER = 30.0
_REMEMBERED = 64
"""Names of forks that leave together; when there are more, those that have left are forgotten."""
_CHUNK = 60.0
"""Seconds of one wait for the next announcement."""
_AGAIN = 5.0
"""Seconds until a rank 0 that did not answer is asked again."""


class Donor:
    """Serves forks of a run until closed; one on each rank."""

    def __init__(self, run: RunHandle, settings: CloneSettings, extras: CloneExtras) -> None:
        """Listen; nothing happens until somebody asks."""
        self._run, self._settings, self._extras = run, settings, extras
        self._closed = threading.Event()
        self._sessions: list[Serving] = []
        self._departures: dict[str, Departure] = {}
        self._reports: list[ForkReport] = []
        self._lock = threading.Lock()
        hosts = _fork_hosts(run.group, settings.host)
        self._places = Places.of_donors(run.group, run.model, hosts)
        self._asked = 0
        self._listener: ForkListener | None = None
        self._board = self._open_board(hosts.addresses[0])
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
        for subscription in self._subscriptions:
            subscription.cancel()
        with self._lock:
            sessions = list(self._sessions)
        for serving in sessions:
            if not serving.over.is_set():
                serving.last_words("the run has ended")
            serving.join(5.0)
        if self._listener is not None:
            self._listener.close()
        self._board.close()
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
        """Let a group in, or say why not; on a thread of the listener."""
        if self._closed.is_set():
            raise CloneError("it has ended")
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
        self._board.set(_announced(number), json.dumps(asked).encode())
        return {"session": asked["session"], "run": self._run.id}

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
            if len(self._departures) > _REMEMBERED:
                self._departures = {n: d for n, d in self._departures.items() if not d.settled}
            return self._departures.setdefault(name, Departure(count=count, at_step=at_step))

    def _watch(self) -> None:
        """Serve what rank 0 announces."""
        number, answers = 1, True
        while not self._closed.is_set():
            try:
                key = _announced(number)
                if self._board.wait_any([key], _CHUNK) is None:
                    continue
                asked = json.loads(self._board.get(key) or b"null")
            except OSError as error:
                # It may only have been stopped for a while: whoever gave up here would let every
                # later fork fail. If it is gone, the training ends, and this with it.
                if answers and not self._closed.is_set():
                    log.info("forks wait until rank 0 answers again: %s", error)
                answers = False
                self._closed.wait(_AGAIN)
                continue
            number, answers = number + 1, True
            if asked is not None:  # else it was over before this rank heard of it
                self._try_to_begin(key, asked)

    def _try_to_begin(self, key: str, asked: dict[str, Any]) -> None:
        """A fork that cannot be served, for want of a thread perhaps, must not be the last one."""
        session = Session(self._board, asked["session"], timeout=_ANSWER)
        try:
            self._begin(key, asked, session)
        except Exception as error:
            why = f"rank {self._run.group.rank} cannot serve it: {error}"
            log.exception("a fork failed, this run goes on: %s", why)
            report = ForkReport(
                session=session.name[:8],
                clones=len(asked["places"]),
                approach=str(asked["approach"]),
                failure=why,
            )
            with self._lock:
                self._reports.append(report)
            self._departure(asked["together"], asked["at_step"]).give_up(why)
            session.fail(why)
            self._forget(key, session.name)

    def _begin(self, key: str, asked: dict[str, Any], session: Session) -> None:
        departure = self._departure(asked["together"], asked["at_step"])
        serving = Serving(
            self._run,
            self._settings,
            session,
            self._places,
            asked,
            self._extras,
            departure,
            on_over=lambda: self._forget(key, session.name),
        )
        with self._lock:
            self._reports.append(serving.report)
            self._sessions = [*(s for s in self._sessions if not s.over.is_set()), serving]

    def _forget(self, key: str, session: str) -> None:
        """A fork is over: rank 0 keeps nothing of it but its last words."""
        board = self._board
        if isinstance(board, Board):
            board.set(key, b"null")  # the key stays: a rank that is late goes on to the next
            board.end(prefix_of(session))

    def _open_board(self, host: str) -> BoardAccess:
        """Rank 0's board; it lives as long as this object on rank 0."""
        group, token = self._run.group, self._run.group.secret("forks")
        board = Board()
        place = problem = ""
        if group.rank == 0:
            try:
                self._listener = ForkListener(
                    self._run.folder, host=host, token=token, board=board, answer=self._answer
                )
                place = self._listener.address.encode()
            except ConfigError as error:
                problem = str(error)
        # Also why there is none: else the others would wait for what does not come.
        place, problem = json.loads(group.share_text("fork listener", json.dumps([place, problem])))
        if problem:
            raise ConfigError(problem)
        if group.rank == 0:
            return board
        address = Address(**json.loads(place))
        return RemoteBoard(address.nearest, address.port, token, timeout=_ANSWER)


def _fork_hosts(group: Group, setting: str) -> Hosts:
    """Where clones reach each donor: rank 0's setting ``host`` is for its whole machine.

    Raises:
        ConfigError: on every rank, if an address is not one of its machine.
    """
    hosts = find_hosts(group)
    said = ["", ""]
    if group.rank == 0 and setting:
        try:
            said = [own_address(setting, "host"), ""]
        except ConfigError as error:
            said = ["", str(error)]
    host, problem = json.loads(group.share_text("host of forks", json.dumps(said)))
    if problem:
        raise ConfigError(problem)
    places = zip(hosts.addresses, hosts.machines, strict=True)
    first = hosts.machines[0]
    return replace(hosts, addresses=tuple((m == first and host) or a for a, m in places))


def _announced(number: int) -> str:
    return f"asked/{number}"


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
