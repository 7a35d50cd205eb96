"""Taking the bytes of one step, in the ways the paper compares, and in one of our own.

    single      rank 0 copies everything after the step, everybody waits        (VELOC-Single)
    sharded     every rank copies its slices after the step, and waits          (VELOC-Sharded)
    backward    a bucket's slices right after its update, inside backward       (VELOC-Opt)
    lazy        after the step, beside the next forward and backward; the bucket's next update
                waits for its copy, and helps

Whatever a step did not update (frozen parameters, a skipped step) and what forward will change
(BatchNorm statistics) is copied when the step ends.

A copy that fails never holds up an update and never raises where the model is updated: the capture
ends like any other, with an error, and whoever began it must not hand its bytes over.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable

from sapwood.checkpoint.report import SaveReport
from sapwood.checkpoint.staging import Batch, Staging
from sapwood.checkpoint.witness import Witness
from sapwood.events import Hold, Marker, TensorUpdated
from sapwood.runtime import faults
from sapwood.runtime.worker import Worker
from sapwood.state.packed import Packed
from sapwood.trace import OFF, Tracer

__all__ = ["MODES", "Backward", "Capture", "Lazy", "make_capture"]

OWNER = "checkpoint"
"""The name under which waits for a capture are attributed."""


class Capture:
    """The bytes of one step on their way into an arena; copies all of them when the step ends."""

    mode = "sharded"

    def __init__(
        self,
        staging: Staging,
        parameters: Iterable[str],
        done: Callable[[Capture], None],
        trace: Tracer = OFF,
    ) -> None:
        """``done`` is called once everything is copied, on whichever thread copied last."""
        self.staging = staging
        self._trace = trace
        self.error: Exception | None = None
        """What went wrong, if something did: then the arena does not hold the step."""
        self.on_error: Callable[[Exception], None] = lambda error: None
        """Told of it at once, before any update that waits for the copy goes on."""
        self.copy_seconds = 0.0
        """Time spent copying, on all threads: the paper's preparation."""
        self.blocking_seconds = 0.0
        """Time the training thread spent in here."""
        self.extras: Callable[[], Packed] = Packed
        """Encodes what was taken beside the tensors when the step ended."""
        self.report: SaveReport | None = None
        """Of the checkpoint; made when the step ended."""
        self.tiers: tuple[str, ...] = ()
        """Where it is to go."""
        self.again = False
        """The step was captured before, for other tiers."""
        self.round = 0
        """How often ranks came to save this step before."""
        self.witness: Witness | None = None
        """Digests what is captured here of another rank's shard, if anything is."""
        self._left = dict.fromkeys(parameters)
        self._done = done

    def updated(self, event: TensorUpdated) -> None:
        """A bucket has its new values."""

    def ended(self) -> None:
        """The step has ended: copy what is left."""
        start = time.perf_counter()
        self._copy_rest()
        self.blocking_seconds += time.perf_counter() - start
        self._done(self)

    def abandon(self) -> None:
        """Give up: the arena's content is worthless, and nobody is held up for it."""

    def fail(self, error: Exception) -> None:
        """The capture is spoilt; it still runs to its end."""
        if self.error is None:
            self.error = error
            self.on_error(error)

    def _claim(self, names: Iterable[str]) -> list[str]:
        mine = [name for name in names if name in self._left]
        for name in mine:
            del self._left[name]
        return mine

    def _copy(self, batch: Batch, marker: Marker | None = None) -> None:
        start = time.perf_counter_ns()
        try:
            faults.point("checkpoint.copy", mode=self.mode)
            if marker is not None:
                marker.wait()
            batch.copy()
            if self.witness is not None:
                self.witness.look(batch.keys)
        except Exception as error:
            self.fail(error)
        end = time.perf_counter_ns()
        self.copy_seconds += (end - start) / 1e9
        self._trace.complete("ckpt_copy", start, end, lane="ckpt", bytes=batch.nbytes)

    def _copy_rest(self) -> None:
        self._copy(self.staging.of_parameters(self._claim(list(self._left))))
        self._copy(self.staging.of_buffers())


class Backward(Capture):
    """Copies a bucket as soon as it is updated, on the thread that updated it."""

    mode = "backward"

    def updated(self, event: TensorUpdated) -> None:
        """Copy the bucket's slices now."""
        self._copy(self.staging.of_parameters(self._claim(event.names)))


class Lazy(Capture):
    """Holds each bucket and copies it in the background, beside the next step."""

    mode = "lazy"

    def __init__(
        self,
        staging: Staging,
        parameters: Iterable[str],
        done: Callable[[Capture], None],
        worker: Worker,
        trace: Tracer = OFF,
    ) -> None:
        """``worker`` copies; an update that comes first does it in its place."""
        super().__init__(staging, parameters, done, trace)
        self._worker = worker
        self._held: list[_Held] = []
        self._counting = threading.Lock()
        self._open = 1  # the step's own end counts as one

    def updated(self, event: TensorUpdated) -> None:
        """Hold the bucket's values."""
        batch = self.staging.of_parameters(self._claim(event.names))
        held = _Held(self, batch, event)
        self._open += 1
        held.hold = event.hold(OWNER, assist=held.copy)
        self._held.append(held)

    def ended(self) -> None:
        """Copy at once what nothing protects, and leave the rest to the background."""
        start = time.perf_counter()
        self._copy_rest()
        self._worker.submit(self._copy_held)
        self.blocking_seconds += time.perf_counter() - start
        self.one_less()

    def _copy_held(self) -> None:
        # In the order in which the next step will want to update them.
        for held in self._held:
            held.copy()

    def abandon(self) -> None:
        """Let everybody go."""
        for held in self._held:
            held.give_up()

    def one_less(self) -> None:
        """A part of the capture is complete."""
        with self._counting:
            self._open -= 1
            complete = self._open == 0
        if complete:
            self._done(self)


class _Held:
    """A bucket that waits to be copied: by the background, or by its own next update."""

    def __init__(self, capture: Lazy, batch: Batch, event: TensorUpdated) -> None:
        self.hold: Hold | None = None
        self._capture = capture
        self._batch = batch
        self._marker = event.marker
        self._lock = threading.Lock()
        self._finished = False

    def copy(self) -> None:
        """Copy, unless it was done already; always let the update go on."""
        with self._lock:
            if self._finished:
                return
            try:
                self._capture._copy(self._batch, self._marker)
            finally:
                self._finish()
        self._capture.one_less()

    def give_up(self) -> None:
        """Release without copying."""
        with self._lock:
            self._finish()

    def _finish(self) -> None:
        self._finished = True
        if self.hold is not None:
            self.hold.release()


MODES = ("auto", "lazy", "backward", "sharded", "single")


def make_capture(
    mode: str,
    staging: Staging,
    parameters: Iterable[str],
    done: Callable[[Capture], None],
    worker: Worker,
    trace: Tracer = OFF,
) -> Capture:
    """A capture of the given mode (``single`` differs from ``sharded`` only in its plan)."""
    if mode == "lazy":
        return Lazy(staging, parameters, done, worker, trace)
    if mode == "backward":
        return Backward(staging, parameters, done, trace)
    return Capture(staging, parameters, done, trace)
