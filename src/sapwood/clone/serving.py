"""One fork, as one donor sees it: from the announcement until the clones are ready, or given up.

Nothing here may harm the training: what goes wrong ends the fork, is logged, and lets every update
go on. Joining happens on a thread of its own; the training's thread only looks at what is new when
a step ends.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from sapwood.clone.beside import send, to_bytes
from sapwood.clone.departure import Departure
from sapwood.clone.extras import CloneExtras, StepExtras
from sapwood.clone.filed import FiledState, remove_state, sync_state, write_extras, write_in_time
from sapwood.clone.manifest import Manifest
from sapwood.clone.places import Places
from sapwood.clone.plan import ClonePlan
from sapwood.clone.report import ForkReport
from sapwood.clone.sender import Sender
from sapwood.clone.session import BoardGone, Session
from sapwood.clone.settings import CloneSettings
from sapwood.clone.terms import make_manifest, owners_of_buckets
from sapwood.errors import CloneError, SapwoodError
from sapwood.events import Hold, Marker, StepBegan, Subscription, TensorUpdated
from sapwood.runtime import faults
from sapwood.runtime.handle import RunHandle
from sapwood.state.contents import Contents, collect, holders_among
from sapwood.state.packed import Packed
from sapwood.tiers.digest import DEFAULT_ALGORITHM
from sapwood.transport.base import Ends, Link, Transfer
from sapwood.transport.choose import open_link

__all__ = ["Serving"]

log = logging.getLogger(__name__)
OWNER = "clone"
_LOOK = 0.05
_CHECK = 0.5
"""Seconds between two looks whether the other side has given up."""
_SHOWN = 3
"""Differences between catalogs that a message names."""
_PARTING = 60.0
"""Seconds to tell clones that a fork failed; twice what the board may take to answer."""


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
        on_over: Callable[[], None],
    ) -> None:
        """``asked`` is what the clones said: their places and wishes; ``places`` are ours.

        ``on_over`` is called, on a thread of this object, when nothing more is said about the fork.
        """
        self.departure = departure
        self._on_over = on_over
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
        self._filed: FiledState | None = None
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
        self._armed = False
        self._taken: Callable[[], Packed] = Packed
        self._taking: StepExtras | None = None
        self._next_step: Subscription | None = None
        self._all_taken = threading.Event()
        self._ended = threading.Event()
        self._sent = threading.Event()
        self._lock = threading.Lock()
        self._parting: threading.Thread | None = None
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
        except Exception as error:
            self._fail_with(error)

    def _step_ended(self, step: int) -> None:
        if self._fire is None and self.departure.problem:
            raise CloneError(self.departure.problem)
        if self._contents is None:
            self._contents = self._collected()
            self._looked.set()
        elif self._fire == step:
            self._end(step)
        elif self._armed and self._fire is None and not self.departure.far(step):
            self._find_step()

    def _collected(self) -> Contents:
        run, ranks = self._run, tuple(range(self._run.group.world))
        holders = holders_among(ranks, run.model, shares_buffers=run.shares_buffers)
        return collect(run.model, run.optimizer, holders)

    def _find_step(self) -> None:
        """Rank 0 says some steps ahead which one is sent: by then all have heard it.

        The others ask for it at the end of a step, because only then is it sure to be there in
        time; they do so from ``armed`` on, which is two or three steps before the one that is sent.
        """
        if self._run.group.rank == 0:
            if self.departure.step is not None:
                self._fire = self.departure.step
                self._session.say("fire", self._fire)
        else:
            start = time.monotonic()
            self._fire = self._session.heard("fire", max(self._budget, 0.0))
            self._waited(time.monotonic() - start)
        if self._fire is not None:
            self.report.step = self._fire

    def updated(self, event: TensorUpdated) -> None:
        """A bucket of the step has its values."""
        sender = self._sender
        if event.step != self._fire or sender is None or self.over.is_set():
            return
        hold = event.hold(OWNER)
        try:
            self._hold(event, hold)
        except Exception as error:
            hold.release()
            self._fail_with(error)

    def _hold(self, event: TensorUpdated, hold: Hold) -> None:
        numbers = {self._buckets_of.get(name) for name in event.names}
        number = numbers.pop()
        if numbers or number is None:
            hold.release()  # buckets were laid out anew: these wait for the step's end
            return
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
        self._keep_up(self._contents)
        self._begin_extras(step)
        self._ended.set()
        if self.report.approach == "file":
            if self._run.group.rank == 0:
                self._write_file(self._contents)
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
            self._wait_for(self._sender)

    def _keep_up(self, before: Contents) -> None:
        """Send the tensors there are now: modules and optimizers may make new ones in a step.

        Raises:
            CloneError: they are of other shapes, or some were sent before they were replaced.
        """
        if before.current():
            return
        now = self._collected()
        if before.catalog != now.catalog:
            raise CloneError(
                "the run has other tensors, or of other shapes, than before the forked step, as "
                "when an optimizer has made its state in it; try again"
            )
        replaced = before.replaced(now)
        if replaced and self.report.approach == "deepclone":
            file, name = replaced[0]
            raise CloneError(
                f"{file} {name} was replaced by another tensor during the forked step, after it "
                "was sent; if the optimizer does so in every step, fork with --approach lazy"
            )
        self._contents = now
        if self._sender is not None:
            self._sender.follow(now)

    def _write_file(self, contents: Contents) -> None:
        start = time.monotonic()
        try:
            self._filed = write_in_time(
                self._run.folder,
                self._session.name,
                contents,
                algorithm=self._algorithm,
                patience=max(self._budget, 0.0),
            )
        finally:
            self._waited(time.monotonic() - start)

    def _wait_for(self, sender: Sender) -> None:
        """Block, as p2p does, but only as long as this run's patience: clones choose the approach.

        Half of it is left for the updates that then find buckets which are not sent yet.
        """
        start = time.monotonic()
        deadline = start + max(self._budget, 0.0) / 2
        while not self.over.is_set() and (left := deadline - time.monotonic()) > 0:
            if sender.finished.wait(min(left, _LOOK)):
                break
        self._waited(time.monotonic() - start)

    def _begin_extras(self, step: int) -> None:
        """Take what a step has beside tensors; what the loop changes after it, a little later."""
        assert self._contents is not None
        self._taking = StepExtras(self._extras, self._run, step, self._contents.plain())
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
        except Exception as error:
            self._fail_with(error)
        self._all_taken.set()

    def _hurry(self, number: int) -> None:
        """An update waits; it never waits longer than the patience that is left."""
        sender = self._sender
        if sender is None:
            return
        start = time.monotonic()
        copies = self._settings.late == "copy"
        try:
            goes_on = sender.hurry(number, max(self._budget, 0.0), copies=copies)
            self._waited(time.monotonic() - start)
            if not goes_on:
                self.fail(
                    f"the clones took more than {self._settings.patience:g} s to receive what the "
                    "next step must change"
                )
        except Exception as error:
            self._fail_with(error)
        for hold in self._holds[number]:
            hold.release()

    def _waited(self, seconds: float) -> None:
        """The training's thread has waited for this fork."""
        self._budget -= seconds
        self.report.waited_seconds += seconds

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
        except Exception as error:
            self._fail_with(error)
        finally:
            self._close()

    def _join(self) -> None:
        session, timeout = self._session, self._settings.join_timeout
        # A run that pauses, for an evaluation, is not one that ended.
        while not self._looked.wait(_CHECK):
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
        session.hear_count("agreed", self._clones, "waiting for the clones", timeout)
        for number, names in enumerate(owners_of_buckets(manifest, contents)):
            self._waiting[number] = names
            self._holds[number] = []
            self._buckets_of.update(dict.fromkeys(names, number))
        if manifest.approach != "file":
            self._connect(manifest, contents)
        session.count("opened")
        if self._run.group.rank == 0:
            self._wait_for_all(manifest.donors)
            self._arm(manifest.donors)
        else:
            session.hear("armed", "waiting for the clones to begin", math.inf)
            self._armed = True  # before rank 0 can count on it
            session.count("looking")

    def _connect(self, manifest: Manifest, contents: Contents) -> None:
        rank = self._run.group.rank
        self._plan = plan = manifest.plan()
        self._device = manifest.devices[rank]
        self.report.nbytes = sum(m.nbytes for m in plan.sent_by(rank))
        ends = Ends(
            me=rank,
            donors=manifest.donors,
            hosts=manifest.hosts,
            machines=manifest.machines,
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
        session, timeout = self._session, self._settings.join_timeout
        what = "waiting for the clones to post their receives"
        session.hear_count("posted", self._clones, what, timeout)
        session.hear_count("opened", donors, "waiting for the other donors to connect", timeout)
        while not self._go.wait(_CHECK):
            session.check()
        self.report.ready = not self.over.is_set()
        self.departure.ready(session.name)

    def _arm(self, donors: int) -> None:
        """Make all donors look for the step, when all forks that leave together are ready."""
        session = self._session
        while not self.departure.all_ready.wait(_CHECK):
            session.check()
        if self.over.is_set():
            return
        session.say("armed", True)
        what = "waiting for the other donors to look for the step"
        session.hear_count("looking", donors - 1, what, self._settings.join_timeout)
        self._armed = True
        self.departure.armed(session.name)

    def _follow(self) -> None:
        """Wait until all is sent, and see the clones begin."""
        session = self._session
        for event in (self._ended, self._all_taken):
            while not event.wait(_CHECK):
                session.check()
        if self.over.is_set():
            return
        self._tell_extras()
        self._sent.wait(self._settings.send_timeout)
        if self._filed is not None:
            sync_state(self._filed)
            faults.point("clone.filed")
            session.say("file", asdict(self._filed))
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
        try:
            while not session.heard("ready"):
                session.check()
                if time.monotonic() > deadline:
                    self._stop_waiting()
                    return
                if self.over.wait(_LOOK):
                    return
        except BoardGone:
            return  # rank 0 has ended; the clones need nothing more of us
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

    def _fail_with(self, error: Exception) -> None:
        """Whatever it is, it is the fork's problem, and no reason to end the training."""
        known = isinstance(error, SapwoodError)
        if not known:
            log.error("unforeseen, while serving a fork", exc_info=error)
        self.fail(str(error) if known else f"{type(error).__name__}: {error}")

    def fail(self, why: str) -> None:
        """End the fork; the training goes on. It takes no time: others are told in the background.

        On any thread, the training's among them.
        """
        if self.over.is_set():
            return
        self.report.failure = self.report.failure or why
        self.departure.give_up(why)
        log.warning("a fork failed, this run goes on: %s", why)
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
        """Let everybody go, at once; telling the clones and closing the link is not waited for."""
        self.over.set()
        for event in (self._looked, self._go, self._ended, self._all_taken, self._sent):
            event.set()
        if self._next_step is not None:
            self._next_step.cancel()
        if self._sender is not None:
            self._sender.stop()
        for holds in list(self._holds.values()):
            for hold in holds:
                hold.release()
        with self._lock:  # until it runs: who finds one that does not would do its work as well
            if self._parting is None:
                self._parting = _thread(self._part)
                with suppress(RuntimeError):  # no more threads: done when this object's own ends
                    self._parting.start()

    def _part(self) -> None:
        """Tell the clones if it failed, and close the link, which wakes whoever waits on it."""
        if self.report.failure:
            self._session.fail(self.report.failure)
        if self._link is not None:
            self._link.close()

    def _close(self) -> None:
        self.stop()
        if self._parting is not None and self._parting.ident is not None:
            self._parting.join(_PARTING)
        else:  # there was no thread to be had
            self._part()
        if self._link is not None:
            self._link.close()  # it may have been opened meanwhile
        if self._sender is not None:
            self._sender.join(5.0)
        self._told = []
        if self.report.approach == "file":
            remove_state(self._run.folder, self._session.name)
        self._session.close()
        self._on_over()

    def join(self, timeout: float) -> None:
        """Wait for the threads."""
        self._thread.join(timeout)


def _thread(work: Callable[[], None]) -> threading.Thread:
    return threading.Thread(target=work, name="sapwood-clone-close", daemon=True)
