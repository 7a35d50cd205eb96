"""One fork, as one donor sees it: from the announcement until the clones are ready, or given up.

Nothing here may harm the training: what goes wrong ends the fork, is logged, and lets every update
go on. Joining happens on a thread of its own; the training's thread only looks at what is new when
a step ends.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from sapwood.clone.beside import send, to_bytes
from sapwood.clone.departure import Departure
from sapwood.clone.extras import CloneExtras, StepExtras
from sapwood.clone.filed import remove_state, write_extras, write_state
from sapwood.clone.manifest import Manifest
from sapwood.clone.places import Places
from sapwood.clone.plan import ClonePlan
from sapwood.clone.report import ForkReport
from sapwood.clone.sender import Sender
from sapwood.clone.session import Session
from sapwood.clone.settings import CloneSettings
from sapwood.clone.terms import make_manifest, owners_of_buckets
from sapwood.errors import CloneError, SapwoodError
from sapwood.events import Hold, Marker, StepBegan, Subscription, TensorUpdated
from sapwood.runtime import faults
from sapwood.runtime.handle import RunHandle
from sapwood.state.contents import Contents, collect
from sapwood.state.packed import Packed
from sapwood.tiers.digest import DEFAULT_ALGORITHM
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
        extras: CloneExtras,
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
        self._algorithm = DEFAULT_ALGORITHM
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
        self._taken: Callable[[], Packed] = Packed
        self._taking: StepExtras | None = None
        self._next_step: Subscription | None = None
        self._all_taken = threading.Event()
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
        except Exception as error:
            # Whatever it is, it is the fork's problem, and no reason to end the training.
            log.exception("unforeseen, while a fork looks at the run")
            self.fail(f"{type(error).__name__}: {error}")

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
        self._begin_extras(step)
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

    def _begin_extras(self, step: int) -> None:
        """Take what a step has beside tensors; what the loop changes after it, a little later."""
        assert self._contents is not None
        self._taking = StepExtras(self._extras, self._run, step, self._contents.plain)
        if self._taking.complete:
            self._complete_extras()
            return
        self._next_step = self._run.events.subscribe(
            StepBegan, lambda _: self._complete_extras(), name=OWNER
        )

    def _complete_extras(self) -> None:
        taking, self._taking = self._taking, None
        if self._next_step is not None:
            self._next_step.cancel()
        if taking is None:
            return
        try:
            self._taken = taking.take()
        except SapwoodError as error:
            self.fail(str(error))
        except Exception as error:  # the user's own: no reason to end the training
            log.exception("unforeseen, while a fork looks at the run")
            self.fail(f"{type(error).__name__}: {error}")
        self._all_taken.set()

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
        self._algorithm = manifest.algorithm
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
        for event in (self._ended, self._all_taken):
            while not event.wait(0.1):
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
        """Rank 0's to every clone, another rank's to the clone that goes on in its place."""
        rank, plan = self._run.group.rank, self._plan
        clones = [clone for clone in range(self._clones) if rank in (0, clone)]
        if not clones:
            return
        taken, self._taken = self._taken(), Packed
        memory = to_bytes(taken, self._algorithm)
        if plan is None or self._link is None:
            path = write_extras(self._run.folder, self._session.name, rank, memory)
            self._session.say(f"extras/{rank}", str(path))
            return
        ends = [plan.donors + clone for clone in clones]
        timeout = self._settings.send_timeout
        self._told = send(memory, self._link, ends, plan.extras_tag, self._device, timeout)

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
        if self._taking is not None:
            # Nobody begins another step, so this is the moment; the rest takes no time of its own.
            self._complete_extras()
            self.join(self._settings.patience)
        if self.report.sent and not self.report.done:
            self._hear_the_last()
        # A file goes with the run; other bytes are in the clones' own memory.
        if not self.report.done and not (self.report.sent and self.report.approach != "file"):
            self.fail(why)
        self.stop()

    def _hear_the_last(self) -> None:
        """What the clones said since somebody looked: they have begun, or why they do not."""
        with suppress(CloneError):
            self.report.done = bool(self._session.heard("ready"))
            if not self.report.done:
                self.report.failure = self.report.failure or self._session.heard("failed") or ""

    def stop(self) -> None:
        """Let everybody go."""
        self.over.set()
        self._looked.set()
        self._go.set()
        self._ended.set()
        self._all_taken.set()
        self._sent.set()
        if self._next_step is not None:
            self._next_step.cancel()
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
        self._told = []
        if self.report.approach == "file":
            remove_state(self._run.folder, self._session.name)
        self._session.close()

    def join(self, timeout: float) -> None:
        """Wait for the thread."""
        self._thread.join(timeout)
