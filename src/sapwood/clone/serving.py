"""One fork, as one donor sees it: from the announcement until the clones are ready, or given up.

Nothing here may harm the training: what goes wrong ends the fork, is logged, and lets every update
go on. Joining happens on a thread of its own; the training's thread only looks at what is new when
a step ends.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from sapwood.clone.departure import Departure
from sapwood.clone.filed import remove_state, write_state
from sapwood.clone.manifest import Manifest
from sapwood.clone.places import Places
from sapwood.clone.plan import ClonePlan
from sapwood.clone.report import ForkReport
from sapwood.clone.sender import Sender
from sapwood.clone.session import Session
from sapwood.clone.settings import CloneSettings
from sapwood.clone.slot import SLOT, pack_text
from sapwood.clone.terms import make_manifest, owners_of_buckets
from sapwood.errors import CloneError, SapwoodError
from sapwood.events import Hold, Marker, TensorUpdated
from sapwood.runtime import faults
from sapwood.runtime.handle import RunHandle
from sapwood.state.contents import Contents, collect
from sapwood.state.extras import Extras
from sapwood.transport.base import Ends, Link, Transfer
from sapwood.transport.choose import open_link

__all__ = ["Serving"]

log = logging.getLogger(__name__)
OWNER = "clone"
_LOOK = 0.05


class Serving:
    """A donor's part in one fork."""

    def __init__(
        self,
        run: RunHandle,
        settings: CloneSettings,
        session: Session,
        places: Places,
        asked: Mapping[str, Any],
        extras: Extras,
        departure: Departure,
    ) -> None:
        """``asked`` is what the clones said: their places and wishes; ``places`` are ours."""
        self.departure = departure
        self._run, self._settings, self._session = run, settings, session
        self._extras = extras
        self._asked = asked
        self._places = places + Places.from_json(asked["places"])
        self._clones = len(asked["places"])
        self.report = ForkReport(
            session=session.name[:8], clones=self._clones, approach=str(asked["approach"])
        )
        self._contents: Contents | None = None
        self._looked = threading.Event()
        self._link: Link | None = None
        self._plan: ClonePlan | None = None
        self._device = "cpu"
        self._told: list[Transfer] = []
        self._sender: Sender | None = None
        self._waiting: dict[int, set[str]] = {}
        self._holds: dict[int, list[Hold]] = {}
        self._markers: dict[int, Marker | None] = {}
        self._buckets_of: dict[str, int] = {}
        self._budget = settings.patience
        self._open = False
        self._go = threading.Event()
        if not asked.get("standby"):
            self._go.set()
        self._fire: int | None = None
        self._may_fire = False
        self._taken: Callable[[], dict[str, Any]] = dict
        self._ended = threading.Event()
        self._sent = threading.Event()
        self._lock = threading.Lock()
        self.over = threading.Event()
        """Nothing more is done for this fork."""
        self._thread = threading.Thread(target=self._serve, name="sapwood-clone", daemon=True)
        self._thread.start()

    # -- on the training's thread ------------------------------------------------------------

    def step_ended(self, step: int) -> None:
        """Look at what is new, between two steps."""
        if self.over.is_set():
            return
        try:
            self._step_ended(step)
        except SapwoodError as error:
            self.fail(str(error))

    def _step_ended(self, step: int) -> None:
        if self._fire is None and self.departure.problem:
            raise CloneError(self.departure.problem)
        if self._contents is None:
            run = self._run
            holders = tuple(range(run.group.world))
            self._contents = collect(run.model, run.optimizer, lambda name: holders)
            self._looked.set()
        elif self._fire == step:
            self._end(step)
        elif self._open and self._fire is None:
            self._find_step()

    def _find_step(self) -> None:
        """Rank 0 says some steps ahead which one is sent: by then all have heard it."""
        if self._run.group.rank == 0:
            if self._may_fire and self.departure.step is not None:
                self._fire = self.departure.step
                self._session.say("fire", self._fire)
        else:
            self._fire = self._session.heard("fire")
        if self._fire is not None:
            self.report.step = self._fire

    def updated(self, event: TensorUpdated) -> None:
        """A bucket of the step has its values."""
        sender = self._sender
        if event.step != self._fire or sender is None or self.over.is_set():
            return
        hold = event.hold(OWNER)
        numbers = {self._buckets_of[name] for name in event.names}
        if len(numbers) > 1:
            hold.release()  # buckets were laid out anew: these wait for the step's end
            return
        number = numbers.pop()
        hold.assist = lambda: self._hurry(number)
        with self._lock:
            self._waiting[number] -= set(event.names)
            self._holds[number].append(hold)
            self._markers[number] = event.marker
            complete = not self._waiting[number]
        if complete and self.report.approach == "deepclone":
            self._launch(number)

    def _launch(self, number: int) -> None:
        assert self._sender is not None
        faults.point("clone.send", bucket=number)
        self._waiting.pop(number)
        self._sender.ready(number, self._holds[number], self._markers[number])

    def _end(self, step: int) -> None:
        assert self._contents is not None
        if not self._contents.current():
            raise CloneError("the model's tensors were replaced during the step; try again")
        groups = self._run.optimizer.param_groups
        self._taken = self._extras.take(step, groups, self._contents.plain)
        self._ended.set()
        if self.report.approach == "file":
            if self._run.group.rank == 0:
                path = write_state(self._run.folder, self._session.name, self._contents)
                self._session.say("file", str(path))
            self._sent.set()
            return
        assert self._sender is not None
        for number in list(self._waiting):
            if not self._waiting[number] and self._holds[number]:
                self._launch(number)
            else:
                # Not updated in this step: nothing keeps these from changing in the next.
                self._waiting.pop(number)
                self._sender.copy_aside(number)
        self._sender.complete()
        self._sent.set()
        if self.report.approach == "p2p":
            self._sender.finished.wait(self._settings.send_timeout)

    def _hurry(self, number: int) -> None:
        """An update waits; it never waits longer than the patience that is left."""
        sender = self._sender
        if sender is None:
            return
        start = time.monotonic()
        copies = self._settings.late == "copy"
        goes_on = sender.hurry(number, max(self._budget, 0.0), copies=copies)
        waited = time.monotonic() - start
        self._budget -= waited
        self.report.waited_seconds += waited
        if not goes_on:
            self.fail(
                f"the clones took more than {self._settings.patience:g} s to receive what the next "
                "step must change"
            )
        for hold in self._holds[number]:
            hold.release()

    def go(self) -> bool:
        """Clones that stand by shall begin; whether these did."""
        if self._go.is_set() or self.over.is_set():
            return False
        self._go.set()
        return True

    # -- on a thread of its own --------------------------------------------------------------

    def _serve(self) -> None:
        try:
            self._join()
            self._follow()
        except SapwoodError as error:
            self.fail(str(error))
        except Exception as error:
            log.exception("unforeseen, while serving a fork")
            self.fail(f"{type(error).__name__}: {error}")
        finally:
            self._close()

    def _join(self) -> None:
        session, timeout = self._session, self._settings.join_timeout
        # A run that pauses, for an evaluation, is not one that ended.
        while not self._looked.wait(0.1):
            session.check()
        contents = self._contents
        if contents is None or self.over.is_set():
            raise CloneError("the run has ended")
        if self._run.group.rank == 0:
            terms = make_manifest(self._run, contents, session.name, self._places, self._asked)
            session.say("manifest", terms.encode())
        text = session.hear("manifest", "waiting for rank 0", timeout)
        manifest = Manifest.decode(text)
        session.until(
            lambda: session.counted("agreed") >= self._clones, "waiting for the clones", timeout
        )
        for number, names in enumerate(owners_of_buckets(manifest, contents)):
            self._waiting[number] = names
            self._holds[number] = []
            self._buckets_of.update(dict.fromkeys(names, number))
        if manifest.approach != "file":
            self._connect(manifest, contents)
        self._open = True  # before rank 0 can count on it
        session.count("opened")
        if self._run.group.rank == 0:
            self._wait_for_all(manifest.donors)

    def _connect(self, manifest: Manifest, contents: Contents) -> None:
        rank = self._run.group.rank
        self._plan = plan = manifest.plan()
        self._device = manifest.devices[rank]
        self.report.nbytes = sum(m.nbytes for m in plan.sent_by(rank))
        ends = Ends(
            me=rank,
            donors=manifest.donors,
            hosts=manifest.hosts,
            timeout=self._settings.join_timeout,
        )
        self._link = open_link(
            manifest.transport, self._session.raw, ends, devices=manifest.devices
        )
        self._sender = Sender(
            self._link,
            plan,
            rank,
            contents,
            timeout=self._settings.send_timeout,
            algorithm=manifest.algorithm,
            device=self._device,
            on_failure=self.fail,
        )

    def _wait_for_all(self, donors: int) -> None:
        """Until every clone can receive, every donor can send, and clones need not stand by."""
        session = self._session
        session.until(
            lambda: (
                session.counted("posted") >= self._clones and session.counted("opened") >= donors
            ),
            "waiting for the clones to post their receives",
            self._settings.join_timeout,
        )
        while not self._go.wait(0.1):
            session.check()
        self._may_fire = not self.over.is_set()
        self.report.ready = self._may_fire
        self.departure.ready(session.name)

    def _follow(self) -> None:
        """Wait until all is sent, and see the clones begin."""
        session = self._session
        while not self._ended.wait(0.1):
            session.check()
        if self.over.is_set():
            return
        self._tell_extras()
        self._sent.wait(self._settings.send_timeout)
        sender = self._sender
        if sender is not None:
            while not sender.finished.wait(0.02):
                if self.over.is_set():
                    return
            self.report.send_seconds = sender.seconds
        self.report.sent = True
        self._see_them_begin()

    def _see_them_begin(self) -> None:
        """They begin with their first forward pass; one that comes late is no failure of the fork.

        Until then a file they read, and a link that has the last bytes, are kept.
        """
        session, deadline = self._session, time.monotonic() + self._settings.step_timeout
        while not session.heard("ready"):
            session.check()
            if time.monotonic() > deadline:
                self._stop_waiting()
                return
            if self.over.wait(_LOOK):
                return
        self.report.done = True
        log.info("%d clones go their own way from step %d", self._clones, self.report.step)

    def _stop_waiting(self) -> None:
        timeout = self._settings.step_timeout
        if self.report.approach == "file":
            raise CloneError(f"the clones have not read the file for {timeout:g} s")
        log.warning(
            "%d clones have the state of step %d, but have not begun for %g s; they are not waited "
            "for any longer",
            self._clones,
            self.report.step,
            timeout,
        )

    def _tell_extras(self) -> None:
        """By the link, which has the shortest way; what is too long for it, by the store."""
        rank = self._run.group.rank
        taken = self._taken()
        slot = pack_text(json.dumps(taken))
        if self._plan is None or slot is None:
            self._session.say(f"extras/{rank}", taken)
        if self._plan is None or self._link is None:
            return
        slot = torch.zeros(SLOT, dtype=torch.uint8) if slot is None else slot
        for clone in range(self._plan.clones):
            if rank in (0, clone):
                end = self._plan.donors + clone
                data = slot.to(self._device)
                self._told.append(self._link.send(end, self._plan.extras_tag, data))

    def fail(self, why: str) -> None:
        """End the fork; the training goes on."""
        if self.over.is_set():
            return
        self.report.failure = self.report.failure or why
        self.departure.give_up(why)
        log.warning("a fork failed, this run goes on: %s", why)
        self._session.fail(why)
        self.stop()

    def last_words(self, why: str) -> None:
        """The run ends: tell the clones, unless they have all they need."""
        # A file goes with the run; other bytes are in the clones' own memory.
        if not self.report.done and not (self.report.sent and self.report.approach != "file"):
            self.fail(why)
        self.stop()

    def stop(self) -> None:
        """Let everybody go."""
        self.over.set()
        self._looked.set()
        self._go.set()
        self._ended.set()
        self._sent.set()
        if self._sender is not None:
            self._sender.stop()
        for holds in list(self._holds.values()):
            for hold in holds:
                hold.release()
        if self._link is not None:
            self._link.close()

    def _close(self) -> None:
        self.stop()
        if self._sender is not None:
            self._sender.join(5.0)
        if self._run.group.rank == 0 and self.report.approach == "file":
            remove_state(self._run.folder, self._session.name)
        self._session.close()

    def join(self, timeout: float) -> None:
        """Wait for the thread."""
        self._thread.join(timeout)
