"""What a training step announces, and the bus that carries it.

A bucket's tensors do not change between their ``TensorUpdated`` event and the same bucket's next
update. A subscriber that needs them for longer than its callback takes a hold on the event's
fence; the next update of that bucket waits until every hold is released. Nobody else ever blocks.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from sapwood.errors import FenceTimeout, SubscriberError, UsageError

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "BackwardBegan",
    "BuffersUpdated",
    "EventBus",
    "Fence",
    "Hold",
    "PlanChanged",
    "RunStopping",
    "StateReplaced",
    "StateReplacing",
    "StepBegan",
    "StepEnded",
    "Subscription",
    "TensorUpdated",
    "UpdatedTensor",
]

E = TypeVar("E")


class Hold:
    """A subscriber's claim on one version of a bucket; release it as soon as you can."""

    def __init__(self, fence: Fence, owner: str, assist: Callable[[], None] | None) -> None:
        """Made by ``Fence.hold``; ``assist`` is called by whoever has to wait for this hold."""
        self.owner = owner
        self.assist = assist
        self._fence = fence
        self._released = threading.Event()

    @property
    def released(self) -> bool:
        """Whether ``release`` was called."""
        return self._released.is_set()

    def release(self) -> None:
        """Let the bucket's next update go ahead; calling it again does nothing."""
        self._released.set()

    def wait(self, timeout: float) -> bool:
        """Wait until released; False when ``timeout`` seconds passed first."""
        return self._released.wait(timeout)

    def __enter__(self) -> Hold:
        """Hold for the length of a ``with`` block."""
        return self

    def __exit__(self, *_: object) -> None:
        """Release."""
        self.release()


class Fence:
    """The holds on one version of one bucket."""

    def __init__(self, label: str) -> None:
        """``label`` names the bucket and the step in errors."""
        self.label = label
        self._holds: list[Hold] = []
        self._closed = False
        self._lock = threading.Lock()

    def hold(self, owner: str, assist: Callable[[], None] | None = None) -> Hold:
        """Claim this version; ``assist`` may finish the work when an update has to wait for it."""
        with self._lock:
            if self._closed:
                raise UsageError(
                    f"{owner!r} asked to hold {self.label} after its next update began; "
                    "take the hold inside the event's callback"
                )
            hold = Hold(self, owner, assist)
            self._holds.append(hold)
            return hold

    def close(self, timeout: float) -> dict[str, float]:
        """Refuse new holds and wait for the old ones; seconds waited, per owner.

        Raises:
            FenceTimeout: an owner did not release in ``timeout`` seconds, all holds together.
            SubscriberError: an owner's ``assist`` raised; its exception is the cause.
        """
        with self._lock:
            self._closed = True
        deadline = time.monotonic() + timeout
        waited: dict[str, float] = {}
        # A hold stays in the list until it is released, so that closing again waits again.
        while self._holds:
            hold = self._holds[0]
            if not hold.released:
                start = time.perf_counter()
                self._wait_for(hold, deadline, timeout)
                waited[hold.owner] = waited.get(hold.owner, 0.0) + time.perf_counter() - start
            self._holds.pop(0)
        return waited

    def _wait_for(self, hold: Hold, deadline: float, timeout: float) -> None:
        if hold.assist is not None:
            try:
                hold.assist()
            except Exception as error:
                raise SubscriberError(
                    f"{hold.owner!r} holds {self.label} and could not finish with it: "
                    f"{type(error).__name__}: {error}"
                ) from error
        if not hold.wait(max(0.0, deadline - time.monotonic())):
            raise FenceTimeout(
                f"{hold.owner!r} has held {self.label} for more than {timeout:g} s, so it "
                "cannot be updated; release the hold sooner or raise fence_timeout"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdatedTensor:
    """A parameter right after its update, with its optimizer state."""

    name: str
    tensor: Tensor
    state: Mapping[str, Tensor]
    """The optimizer's tensors for this parameter, by the optimizer's own names."""
    generation: int
    """How often this tensor was updated in this run: fused optimizers do not move ``_version``."""


class Marker(Protocol):
    """A point in an accelerator's stream that others can wait for."""

    def wait(self) -> None:
        """Make the current stream of the calling thread wait for this point."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorUpdated:
    """The tensors of one bucket have new values, and keep them until the bucket's next update.

    Published on the thread that updated the bucket, often while back-propagation still runs.
    """

    step: int
    bucket: int
    tensors: tuple[UpdatedTensor, ...]
    fence: Fence
    marker: Marker | None = None
    """On an accelerator: wait for this before reading the tensors on a stream of your own."""

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the updated parameters."""
        return tuple(t.name for t in self.tensors)

    @property
    def generation(self) -> int:
        """The newest generation among the tensors."""
        return max(t.generation for t in self.tensors)

    def hold(self, owner: str, assist: Callable[[], None] | None = None) -> Hold:
        """Keep these values past the callback; see ``Fence.hold``."""
        return self.fence.hold(owner, assist)


@dataclass(frozen=True, slots=True, kw_only=True)
class BuffersUpdated:
    """Buffers that forward changes (BatchNorm statistics) are final until the next forward.

    It comes when the step ends; with several ranks the values are rank 0's.
    """

    step: int
    buffers: Mapping[str, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBegan:
    """A step begins: the first forward pass with gradients is about to run, nothing has changed.

    What the training loop does after ``run.step()`` is done. It comes with the first gradient, or
    with ``run.step()``, if no forward pass of the run's model comes before.
    """

    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BackwardBegan:
    """The first gradient of a step is there, and none of its updates has been made yet.

    It comes however the model was called: by its own forward, or part by part.
    """

    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepEnded:
    """The whole state of a step is consistent: every update is done, schedulers have stepped."""

    step: int
    skipped: bool = False
    """No update was made: a gradient scaler found inf or NaN, or no rank had a gradient."""
    grad_norm: float | None = None
    """The global gradient norm before clipping, where clipping is on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanChanged:
    """Buckets were laid out, for the first time or anew; bucket numbers now mean these names."""

    step: int
    buckets: tuple[tuple[str, ...], ...]
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStopping:
    """The run was asked to stop, and this was the last step of all ranks: save what must last.

    Published on the training thread, right after the step; the process ends when all callbacks
    have returned.
    """

    step: int
    reason: str
    deadline: float
    """When waiting must end, by ``time.monotonic()``."""
    saved: list[str] = field(default_factory=list)
    """Where the step was saved; whoever saves it adds the place."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StateReplacing:
    """The run is about to be given another state, between steps: finish what still reads this one.

    Published on all ranks before anything is changed; with ``problems``, nothing is.
    """

    problems: list[Exception] = field(default_factory=list)
    """Why the state cannot be replaced now; whoever cannot finish adds it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StateReplaced:
    """The run goes on from another state: steps that come again are others than the first time."""

    step: int
    """The steps that count as ended."""


@dataclass(slots=True)
class Subscription:
    """One subscriber of one kind of event."""

    name: str
    kind: type[Any]
    callback: Callable[[Any], None]
    seconds: float = 0.0
    """Time spent in the callback, all told."""
    calls: int = 0
    cancelled: bool = False
    _bus: EventBus | None = field(default=None, repr=False)

    def cancel(self) -> None:
        """Receive nothing more, not even the event that others are just being told of."""
        self.cancelled = True
        if self._bus is not None:
            self._bus.cancel(self)


class EventBus:
    """Calls subscribers one after the other, on the publishing thread.

    A subscriber's exception never reaches the publisher: it is kept, and raised on the training
    thread by ``raise_pending`` (which ``Run.step`` calls).
    """

    def __init__(self) -> None:
        """Start with no subscribers."""
        self._subscribers: dict[type[Any], tuple[Subscription, ...]] = {}
        self._lock = threading.Lock()
        self._failures: list[tuple[Subscription, BaseException]] = []

    def subscribe(
        self, kind: type[E], callback: Callable[[E], None], *, name: str | None = None
    ) -> Subscription:
        """Call ``callback`` for each event of ``kind``; ``name`` attributes time and errors."""
        label = name or str(getattr(callback, "__qualname__", repr(callback)))
        subscription = Subscription(name=label, kind=kind, callback=callback, _bus=self)
        with self._lock:
            self._subscribers[kind] = (*self._subscribers.get(kind, ()), subscription)
        return subscription

    def cancel(self, subscription: Subscription) -> None:
        """Forget a subscription."""
        subscription.cancelled = True
        with self._lock:
            kept = tuple(
                s for s in self._subscribers.get(subscription.kind, ()) if s is not subscription
            )
            self._subscribers[subscription.kind] = kept

    def wants(self, kind: type[Any]) -> bool:
        """Whether anybody subscribed to ``kind``: ask before building an expensive event."""
        return bool(self._subscribers.get(kind))

    def publish(self, event: object) -> None:
        """Hand ``event`` to its subscribers."""
        for subscription in self._subscribers.get(type(event), ()):
            if subscription.cancelled:
                continue
            failure: Exception | None = None
            start = time.perf_counter()
            try:
                subscription.callback(event)
            except Exception as error:
                failure = error
            self._note(subscription, time.perf_counter() - start, failure)

    def _note(self, subscription: Subscription, seconds: float, failure: Exception | None) -> None:
        with self._lock:
            subscription.seconds += seconds
            subscription.calls += 1
            if failure is not None:
                self._failures.append((subscription, failure))

    def raise_pending(self) -> None:
        """Raise the first subscriber's exception since the last call, if there was one."""
        with self._lock:
            failures, self._failures = self._failures, []
        if not failures:
            return
        subscription, error = failures[0]
        more = f" (and {len(failures) - 1} more)" if len(failures) > 1 else ""
        raise SubscriberError(
            f"the subscriber {subscription.name!r} of {subscription.kind.__name__} raised "
            f"{type(error).__name__}: {error}{more}"
        ) from error

    def subscriptions(self) -> tuple[Subscription, ...]:
        """All subscriptions, for reports."""
        with self._lock:
            return tuple(s for group in self._subscribers.values() for s in group)
