"""Stopping a run when somebody asks: by a signal to any rank, or by a limit of time.

All ranks end the same step (``agreed``), whatever wants to be saved is saved (``RunStopping``), all
wait for each other, and the training loop sees ``Stopped``.
"""

from __future__ import annotations

import logging
import os
import signal
import time
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from sapwood.errors import ConfigError, SapwoodError, SubscriberError
from sapwood.events import EventBus, RunStopping
from sapwood.runtime.agreed import AgreedStep
from sapwood.runtime.clock import process_age, slurm_seconds_left, started_again
from sapwood.runtime.durations import parse_seconds, show_seconds
from sapwood.runtime.group import Group
from sapwood.runtime.notes import LaunchNote
from sapwood.runtime.signals import listen
from sapwood.runtime.stopped import Stopped

__all__ = ["StopSettings", "Stopping", "check_time_left"]

log = logging.getLogger(__name__)
_SLURM = "slurm"
# How the reason begins on every rank, whichever of them found that the time is over.
_LIMIT = "the time limit"
# Steps a stop may take once it is asked for: the one under way, and one more for a rank ahead.
_STEPS = 2
_REMEMBERED = 16
# How long a rank whose group failed may take to say so, before a signal takes its usual effect.
_LAST_WORDS = 5.0
_MARGIN = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StopSettings:
    """When a run stops by itself, and how."""

    time_limit: float | str | None = None
    """Have stopped when so much time has passed since the job began, such as "3h55m"; "slurm":
    when the Slurm job ends."""
    stop_timeout: float | str = 60.0
    """How long a run that stops waits for its last checkpoint to be durable."""
    stop_signals: str | tuple[str, ...] | list[str] | None = ("SIGTERM", "SIGUSR1")
    """The signals that ask a run to stop; None: none."""

    def __post_init__(self) -> None:
        """Refuse what cannot be meant."""
        parse_seconds(self.stop_timeout, "stop_timeout")
        _ = self.signals
        if self.time_limit not in (None, _SLURM):
            assert self.time_limit is not None
            if parse_seconds(self.time_limit, "time_limit") == 0:
                raise ConfigError("time_limit is 0, expected a time such as '3h55m', or none")

    @property
    def signals(self) -> tuple[signal.Signals, ...]:
        """The signals themselves."""
        given = self.stop_signals or ()
        names = given.replace(",", " ").split() if isinstance(given, str) else given
        return tuple(_signal(str(getattr(name, "name", name))) for name in names)

    def seconds_left(self) -> float | None:
        """Until the limit of time; negative if it is over, None if there is none."""
        if self.time_limit is None:
            return None
        if self.time_limit == _SLURM:
            return slurm_seconds_left()
        return parse_seconds(self.time_limit, "time_limit") - process_age()


def _signal(name: str) -> signal.Signals:
    full = name.upper() if name.upper().startswith("SIG") else f"SIG{name.upper()}"
    found = getattr(signal, full, None)
    if not isinstance(found, signal.Signals) or found in (signal.SIGKILL, signal.SIGSTOP):
        raise ConfigError(
            f"stop_signals has {name!r}, expected names of signals a process can catch, such as "
            "SIGTERM, SIGUSR1; or none"
        )
    return found


def check_time_left(settings: StopSettings) -> None:
    """End at once where there is no time for a single step.

    Raises:
        Stopped: the limit of time is over.
    """
    left = settings.seconds_left()
    # An attempt after the one that stopped for this limit would only save what is saved.
    least = parse_seconds(settings.stop_timeout, "stop_timeout") if started_again() else 0.0
    if left is not None and left <= least:
        reason = f"{_LIMIT} ({_shown(settings)}) was over before the run began"
        log.warning("%s: nothing is trained; raise time_limit=, or start the job anew", reason)
        note = LaunchNote(int(os.environ.get("RANK", "0")))
        note.write(stopped=0, saved=False, reason=reason, final=True)
        raise Stopped(step=0, reason=reason, saved=False, final=True)


_living: weakref.WeakSet[Stopping] = weakref.WeakSet()
"""Of all Runs in this process."""


class Stopping:
    """Sees that a run stops when it is asked to; a part of ``Run``, which closes it."""

    def __init__(
        self,
        group: Group,
        events: EventBus,
        settings: StopSettings,
        last_whole_step: Callable[[], int | None],
    ) -> None:
        """Listen from now on; ``last_whole_step`` is None in the middle of a step."""
        self.stopped: Stopped | None = None
        """What ended the run, once it has."""
        self._group, self._events, self._settings = group, events, settings
        self._last_whole_step = last_whole_step
        self._timeout = parse_seconds(settings.stop_timeout, "stop_timeout")
        left = settings.seconds_left()
        self._limit = None if left is None else time.monotonic() + left
        self._most = 0.0 if left is None else left / 2
        self._signal: signal.Signals | None = None
        self._last_end = time.monotonic()
        self._steps: deque[float] = deque(maxlen=_REMEMBERED)
        self._note = LaunchNote(group.rank)
        self._note.write(needs=self._timeout)
        self._agreed = AgreedStep(
            group,
            "stop",
            what="agreeing on the step to stop at",
            when=self._time_is_up,
            hopeless=self._give_up,
        )
        self._listening = listen(settings.signals, self._heard)
        _living.add(self)

    @property
    def asked(self) -> bool:
        """Whether this rank knows that the run is to stop."""
        return self._agreed.reason is not None

    def check(self) -> None:
        """Refuse to go on after the end.

        Raises:
            Stopped: again.
        """
        if self.stopped is not None:
            raise self.stopped

    def step_ended(self, step: int) -> None:
        """End the run here if all ranks agreed on this step.

        Raises:
            Stopped: they did, and what had to be saved is.
            PeerFailed: another rank failed before an agreement.
        """
        now = time.monotonic()
        self._steps.append(now - self._last_end)
        self._last_end = now
        if self._agreed.reach() == 0:
            self._stop(step)

    def close(self) -> None:
        """Listen no more; the handlers that were there before come back."""
        _living.discard(self)
        self._agreed.close()
        self._listening.close()
        if self.stopped is None:
            self._note.remove()

    # -- asking --------------------------------------------------------------------------------

    def _heard(self, name: str) -> None:
        """Runs in a signal handler."""
        self._signal = self._signal or signal.Signals[name]
        self._agreed.ask(f"{name} to rank {self._group.rank}")

    def _time_is_up(self) -> str | None:
        if self._limit is None:
            return None
        # Steps under way and the save must fit; never more than half, or nothing would be trained.
        longest = max(self._steps, default=0.0)
        margin = min(_STEPS * longest + self._timeout, self._most)
        if time.monotonic() < self._limit - margin:
            return None
        return f"{_LIMIT} ({_shown(self._settings)}) is near"

    def _give_up(self) -> None:
        """A rank failed or left, so no step will be agreed on: a signal then ends this process.

        Whoever sent it expects that: most often a launcher that ends the ranks of a failed group.
        """
        if self._signal is None:
            return
        deadline = time.monotonic() + _LAST_WORDS
        while not self._agreed.closed and time.monotonic() < deadline:
            time.sleep(0.05)
        if not self._agreed.closed:
            self._listening.hopeless = True
            os.kill(os.getpid(), self._signal)

    # -- the end -------------------------------------------------------------------------------

    def _stop(self, step: int) -> None:
        reason = self._agreed.reason or "asked to"
        if self._group.rank == 0:
            saves = self._events.wants(RunStopping)
            how = "saving first" if saves else "without saving: the run has no Checkpointer"
            log.warning("stopping after step %d, %s (%s)", step, how, reason)
        deadline = time.monotonic() + self._timeout
        self._note.write(needs=self._timeout, until=time.time() + self._timeout)
        # Other Runs of this process, which all ranks have brought to the same point as well: the
        # process ends for them, too.
        others = {one: one._last_whole_step() for one in _living if one is not self}
        saved = self._save(RunStopping(step=step, reason=reason, deadline=deadline))
        for other, last in others.items():
            saved = other._save_beside(last, reason, deadline) and saved
        saved = self._meet(deadline, saved=saved)
        final = reason.startswith(_LIMIT)
        self._note.write(needs=self._timeout, stopped=step, saved=saved, reason=reason, final=final)
        self.stopped = Stopped(step=step, reason=reason, saved=saved, final=final)
        for other, last in others.items():
            other.stopped = Stopped(step=last or 0, reason=reason, saved=saved, final=final)
        for one in (self, *others):
            # A launcher that sees the first rank end asks the others to: they are about to.
            one._listening.deaf = True
        raise self.stopped

    def _save_beside(self, step: int | None, reason: str, deadline: float) -> bool:
        """Save this Run, because another one of this process stops; False if it is not saved."""
        if not self._events.wants(RunStopping):
            return True
        if step is None:
            log.warning(
                "another Run of this process is in the middle of a step, so it is not saved: a "
                "restart goes on from its last checkpoint"
            )
            return False
        return self._save(RunStopping(step=step, reason=reason, deadline=deadline))

    def _save(self, event: RunStopping) -> bool:
        """Whether somebody saved the step, and nobody failed."""
        try:
            self._events.raise_pending()
        except SubscriberError as error:
            log.error("in the last step: %s", error)
        self._events.publish(event)
        try:
            self._events.raise_pending()
        except SubscriberError as error:
            log.error("step %d may not be saved: %s", event.step, error.__cause__ or error)
            return False
        if not event.saved and self._group.rank == 0 and self._events.wants(RunStopping):
            log.warning("step %d is not saved: the run has no Checkpointer", event.step)
        return bool(event.saved)

    def _meet(self, deadline: float, *, saved: bool) -> bool:
        """Wait for all ranks, so that none is ended for another's exit before it has saved.

        Returns whether all of them have.
        """
        world, store = self._group.world, self._group.store
        if world == 1:
            return saved
        try:
            store.add("stop/saved", int(saved))
            if store.add("stop/done", 1) == world:
                store.set("stop/all-done", "1")
            # A little longer than anybody saves: who just made it must not find others gone.
            while not store.wait("stop/all-done", 0.5):
                failed = self._group.board.read(self._group.step) is not None
                if failed or time.monotonic() > deadline + _MARGIN:
                    return False
            return store.add("stop/saved", 0) == world
        except (SapwoodError, RuntimeError) as error:
            log.info("the other ranks are not waited for, the group is gone: %s", error)
            return False


def _shown(settings: StopSettings) -> str:
    limit = settings.time_limit
    if limit is None or limit == _SLURM:
        return "the end of the Slurm job"
    return show_seconds(parse_seconds(limit, "time_limit"))
