"""The layer-wise engine: average buckets during backward, update each as soon as it is averaged.

    gradients of a bucket complete (hooks) ─> its contribution ─> it is its turn ─> averager
    worker: wait for the average ─> wait for the bucket's fence ─> optimizer ─> TensorUpdated

Every rank sends, in every step: every bucket of the plan in order; the gradients outside the plan,
only when the flags of the last bucket say that some rank has one; and rank 0's buffers, when the
step ends. A step that does not fit the plan is completed at the end of backward with zeros and
cleared flags, so no rank ever waits for a collective another rank does not send.
"""

from __future__ import annotations

import enum
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from sapwood.errors import PeerFailed, UsageError
from sapwood.events import TensorUpdated
from sapwood.runtime import faults
from sapwood.runtime.worker import Worker
from sapwood.sync import refusals
from sapwood.sync.averaging.base import Pending
from sapwood.sync.base import Context, StepOutcome, SyncStats
from sapwood.sync.bucket import Bucket
from sapwood.sync.bucketset import BucketSet
from sapwood.sync.buffers import BufferSync
from sapwood.sync.deferred import apply_all
from sapwood.sync.gradients import TOO_EARLY
from sapwood.sync.guard import BackwardGuard, in_backward, nested
from sapwood.sync.hooks import GradientHooks, ModuleHook
from sapwood.sync.members import Members
from sapwood.sync.order import graph_roots, joint_order, ready_order
from sapwood.sync.plan import Plan
from sapwood.sync.planning import agree_plan, announce_plan, observed_order
from sapwood.sync.reads import WeightReads
from sapwood.sync.replan import Replanner
from sapwood.sync.updates import Updater

__all__ = ["Layerwise"]

_NOT_PLANNED, _DISORDER, _BUFFERS = 0, 1, 2  # places of the status flags in the last bucket


class _Phase(enum.Enum):
    IDLE = "between steps"
    BACKWARD = "in back-propagation"
    REDUCING = "after back-propagation"
    BROKEN = "broken"


class Layerwise:
    """Sapwood's own reducer; see the module's text. Fulfils ``Synchroniser``."""

    def __init__(self, context: Context) -> None:
        """Prepare; ``attach`` installs the hooks."""
        self.model = context.model
        self.stats = SyncStats()
        self.accumulating = False
        self._context = context
        self._averager = context.averaging.averager
        self._tuner = context.tuner
        self._members = Members(context.model, context.views.optimizer)
        self._members.note(context.names, context.parameters)
        self._ever_absent: set[int] = set()
        self._updater = Updater(context, self.stats)
        self._buffers = BufferSync(context)
        self._worker = Worker("sapwood-update", on_error=self._tell_peers)
        self._replanner = Replanner(context.settings.replan_after)
        self._on_gradients: GradientHooks | None = None
        self._handles: list[torch.utils.hooks.RemovableHandle] = []
        self._phase = _Phase.IDLE
        self._cause = ""  # of the phase BROKEN
        self._armed = False
        self._plan: Plan | None = None
        self._buckets: BucketSet | None = None
        self._names: tuple[tuple[str, ...], ...] = ()
        self._next = self._complete = 0  # buckets launched, and complete in order, in this step
        self._predicted: list[int] = []
        self._fired: list[int] = []
        self._disorder = self._agree_on_buffers = False
        self._reads: WeightReads | None = None
        self._watching: list[bool] = []
        self._forward_seen = False
        self._careful = True
        self._keeps_gradients = False
        self._late: set[int] = set()
        self._withheld: list[Bucket] = []
        self._nested_pass = -1
        self._step_start = 0.0
        self._forward_start = self._forward_end = self._last_gradient = 0
        self._updated_at, self._absent, self._woken = list[int](), list[int](), list[int]()

    # -- the contract ------------------------------------------------------------------------

    @property
    def begun(self) -> bool:
        """Whether weights may be ahead of the last step that ended."""
        return self._phase is not _Phase.IDLE

    @property
    def buckets(self) -> tuple[tuple[str, ...], ...]:
        """Names by bucket; empty before the first backward."""
        return self._names if self._buckets is None else self._buckets.names

    def attach(self) -> None:
        """Install hooks on the model and its parameters."""
        self._on_gradients = GradientHooks(self._context.parameters, self._gradient_hook)
        self._handles = [
            self.model.register_forward_pre_hook(ModuleHook(self._before_forward)),
            self.model.register_forward_hook(ModuleHook(self._after_forward), always_call=True),
        ]
        if self._context.mode == "layerwise":
            self._reads = WeightReads(self._context, self._broken)
        self._updater.reads = self._reads

    def wait(self) -> None:
        """Wait until this step's gradients are averaged (and, if layer-wise, applied)."""
        self._check()
        self._end_unnoticed()
        settings = self._context.settings
        # The worker bounds each of its own waits, so this bound is only for a fault in it.
        patience = (settings.timeout + settings.fence_timeout) * (len(self._planned) + 2)
        self._worker.drain(patience)
        self._updater.lane.join()

    def finish(self) -> StepOutcome:
        """End the step. Without a backward this rank takes part with no gradients of its own."""
        self._check()
        # Half an update cannot be repeated: whatever interrupts this breaks the step.
        with self._breaking():
            return self._finish()

    def _finish(self) -> StepOutcome:
        if self._phase is _Phase.IDLE:
            self._follow_membership()
            self._begin()
            self._end()
        start = time.perf_counter_ns()
        self.wait()
        self.stats.wait_seconds += (time.perf_counter_ns() - start) / 1e9
        self._trace_span("wait", start)
        outcome = self._apply()
        self._buffers.finish(self._updater.step, agree=self._agree_on_buffers)
        self._check_replaced()
        self._count()
        assert self._buckets is not None
        for bucket in self._buckets:
            bucket.clear()
            bucket.reset()
        if self._reads is not None:
            self._reads.end_step()
        self._watching.clear()  # a forward that was interrupted never ended
        # On every rank in every step, or trials would not end together.
        self._tuner.note(time.perf_counter() - self._step_start if self._forward_seen else None)
        self._phase = _Phase.IDLE
        self._forward_seen = False
        self._updater.end_step()
        return outcome

    def close(self) -> None:
        """Remove hooks and end the worker."""
        self._detach()
        if self._reads is not None:
            self._reads.close()
        # A rank that failed must not wait for others, which may be long in coming.
        waits = self._healthy() and not self._context.group.board.posted
        self._worker.close(timeout=self._context.settings.timeout if waits else 1.0)
        self._names = self.buckets
        self._release_buckets()
        self._averager.close()

    def generation(self, name: str) -> int:
        """How often a parameter was updated."""
        return self._updater.generations[name]

    def resume_at(self, step: int) -> None:
        """Call the next step ``step``."""
        self.wait()
        self._updater.step = step

    # -- forward -----------------------------------------------------------------------------

    def _before_forward(self, module: nn.Module, args: object) -> None:
        self._watching.append(False)
        if in_backward():  # a checkpointed segment is recomputed
            return
        self._check()
        if self._phase is _Phase.BACKWARD:
            self._end_unnoticed()
        if self._phase is _Phase.REDUCING:
            self.wait()  # weights must not change under a forward
        if not torch.is_grad_enabled():
            return
        if self._members.frozen():  # another Run trains through this model
            return
        converted = self._members.converted()
        if converted is not None:
            raise self._broken(converted)
        self._follow_membership()
        if self._on_gradients is not None:
            self._on_gradients.be_last()
        self._updater.begin_step()
        if not self._forward_seen:
            self._step_start = time.perf_counter()
        self._forward_seen = True
        if self._reads is not None:
            self._reads.start_forward()
            self._watching[-1] = True
        self._forward_start = time.perf_counter_ns()

    def _after_forward(self, module: nn.Module, args: object, output: object) -> None:
        if self._watching and self._watching.pop() and self._reads is not None:
            self._reads.end_forward()
        if in_backward():
            return
        if not torch.is_grad_enabled() or output is None or self._members.frozen():
            return
        self._forward_end = time.perf_counter_ns()
        self._trace_span("forward", self._forward_start, self._forward_end)
        if self._plan is None and not self.accumulating:
            # Only the order is kept: a graph that is never back-propagated must go.
            order = ready_order(graph_roots(output), self._context.parameters)
            self._predicted = joint_order(self._predicted, order)

    # -- backward ----------------------------------------------------------------------------

    def _gradient_hook(self, index: int) -> Callable[[Tensor], None]:
        def hook(parameter: Tensor) -> None:
            if self._phase is not _Phase.BACKWARD or not self._armed:
                if self.accumulating and self._phase is _Phase.IDLE:
                    return
                self._enter_backward()
            assert self._buckets is not None
            slot = self._buckets.slots[index]
            if slot.filled:
                raise self._broken(refusals.twice(slot.name))
            slot.filled = True
            self._fired.append(index)
            bucket = slot.bucket
            if bucket.number < len(self._planned):  # others get their memory when they wake
                try:
                    bucket.take(slot)
                except UsageError as error:
                    raise self._broken(str(error)) from None
            bucket.missing -= 1
            if not bucket.missing:
                self._full(bucket)

        return hook

    def _enter_backward(self) -> None:
        """The first gradient of a backward pass is there, or the first after a nested one."""
        if self._phase is not _Phase.BACKWARD:
            self._begin()
        if not nested():
            BackwardGuard(self._end, self._aborted).arm()
            self._armed = True
        elif self._nested_pass != (number := torch._C._current_graph_task_id()):
            self._nested_pass = number
            BackwardGuard(lambda: None, self._aborted).arm()

    def _full(self, bucket: Bucket) -> None:
        self._last_gradient = time.perf_counter_ns()
        planned = self._planned
        if bucket.number >= len(planned):
            return
        if bucket.number != self._complete:
            self._disorder = True
        while self._complete < len(planned) and not planned[self._complete].missing:
            self._complete += 1
        if self._overlaps():
            # The last bucket waits for the end of backward: its status flags are known only then.
            for ready in planned[self._next : min(self._complete, len(planned) - 1)]:
                self._launch(ready)

    def _overlaps(self) -> bool:
        """Whether buckets are averaged, and may be applied, during back-propagation.

        Always in a careful step, which finds out what is read after a bucket was handed over.
        """
        wanted = self._context.events.wants(TensorUpdated)
        return self._careful or wanted or self._tuner.choice.overlap

    def _begin(self) -> None:
        with self._breaking():
            self._start_step()

    def _start_step(self) -> None:
        self._check()
        if self._phase is _Phase.REDUCING:
            raise self._broken(refusals.FORGOTTEN)
        self._phase = _Phase.BACKWARD
        self._armed = False
        self._context.group.step = self._updater.step
        self._updater.begin_step()
        self._updater.begin_backward()
        if not self._forward_seen and (names := self._members.unfrozen()):
            raise UsageError(refusals.unfrozen(names))
        due = self._replanner.reason or self._tuner.due
        if self._plan is None or due is not None:
            self._make_plan(due or "first backward")
        self._fired, self._updated_at, self._absent, self._woken = [], [], [], []
        self._next, self._complete, self._disorder = 0, 0, False
        self._context.views.follow()
        assert self._buckets is not None
        self._keeps_gradients = self._context.views.keeps_gradients
        self._buckets.follow(keeps_gradients=self._keeps_gradients)
        if self._reads is not None:
            self._late = self._reads.late
            self._reads.start_backward()
            self._reads.say_new("used through detach() or .data")

    def _launch(self, bucket: Bucket, status: Sequence[float] = ()) -> None:
        self._next = bucket.number + 1
        bucket.seal(status)
        bucket.note_versions()
        if self._careful and self._reads is not None:
            self._reads.seal(bucket.indices, updated=False)
        step = self._updater.step
        faults.point("sync.launch", step=step, bucket=bucket.number)
        launched = time.perf_counter_ns()
        if not bucket.nbytes:
            self._updater.lane.follow()  # a collective would have ordered the streams
            self._worker.submit(lambda: self._ready_alone(bucket))
            return
        what = f"averaging bucket {bucket.number} of step {step} ({refusals.some(bucket.names)})"
        pending = self._averager.launch(bucket.number, what)
        self._worker.submit(lambda: self._reduced(bucket, pending, launched))

    def _end(self) -> None:
        """Backward is over: send what is left, complete or not."""
        if self._phase is _Phase.BACKWARD:
            with self._breaking():
                self._send_rest()

    def _send_rest(self) -> None:
        self._armed = False
        self._trace_span("backward", self._forward_end)
        if self._context.trace.on:
            self._context.trace.instant("backward_last_gradient", step=self._updater.step)
        assert self._buckets is not None
        flags = (self._buckets.dormant_used(), self._disorder, self._buffers.outdated())
        for bucket in self._planned[self._next : -1]:
            self._launch(bucket)
        self._last_gradient = self._last_gradient or time.perf_counter_ns()
        self._launch(self._planned[-1], [float(flag) for flag in flags])
        if self._reads is not None:
            self._reads.end_backward()
            self._reads.say_new("read again after its gradient is complete")
        self._phase = _Phase.REDUCING
        # A rank without a batch has not seen whether weights are read late.
        self._careful = self._careful and not self._fired
        self._worker.submit(self._update_withheld)
        wait = self._show_averages
        if self._context.mode == "layerwise" and self._keeps_gradients:
            if not flags[0] and all(bucket.complete for bucket in self._planned):
                return  # whoever looks at an average waits for it
            wait = self._wait_in_backward  # but some gradients are not averages yet, or not there
        if in_backward():
            # Another Run that shares this backward must have sent its gradients before we wait.
            BackwardGuard(wait, self._aborted).arm()
        else:
            wait()

    def _wait_in_backward(self) -> None:
        with self._breaking():
            self.wait()

    def _show_averages(self) -> None:
        """``p.grad`` is this rank's own: it may be looked at, clipped or changed from now on."""
        with self._breaking():
            self.wait()
            assert self._buckets is not None
            for bucket in self._buckets:
                self._refuse_meddling(bucket)
                bucket.show()
                bucket.note_shown()

    def _refuse_meddling(self, bucket: Bucket) -> None:
        """One rank, deferred, has nothing on its way: what hooks do to gradients is followed."""
        if (bucket.nbytes or self._context.mode == "layerwise") and bucket.meddled():
            raise self._broken(refusals.gradient_in_flight(bucket.names))

    def _end_unnoticed(self) -> None:
        """Every gradient came from nested backward passes, whose ends say nothing of the outer."""
        if self._phase is _Phase.BACKWARD and not self._armed and not in_backward():
            self._end()

    def _aborted(self) -> None:
        if self._reads is not None:
            self._reads.end_backward()
        if self._phase is not _Phase.BROKEN:  # else that is why
            self._broken(refusals.ABORTED)

    # -- worker ------------------------------------------------------------------------------

    def _reduced(self, bucket: Bucket, pending: Pending, launched: int) -> None:
        with self._updater.lane.active():
            pending.wait()
            self._updater.trace_reduced(bucket.number, launched, bucket.nbytes)
            self._averaged(bucket)

    def _ready_alone(self, bucket: Bucket) -> None:
        with self._updater.lane.active():
            self._averaged(bucket)

    def _averaged(self, bucket: Bucket) -> None:
        self._refuse_meddling(bucket)
        late = self._context.mode != "layerwise"  # then shown when back-propagation has ended
        self._absent += [slot.index for slot in bucket.settle(show=not late)]
        if not late:
            if self._must_wait(bucket):
                self._withheld.append(bucket)
            else:
                self._update(bucket)
        if bucket is self._planned[-1]:
            self._disorder = bucket.status[_DISORDER] > 0
            self._agree_on_buffers = bucket.status[_BUFFERS] > 0
            if bucket.status[_NOT_PLANNED] > 0:
                self._reduce_dormant()

    def _must_wait(self, bucket: Bucket) -> bool:
        """Whether back-propagation may still need the old values."""
        if self._phase is not _Phase.BACKWARD:
            return False
        if self._careful or not self._forward_seen:
            return True
        return bool(self._late) and not self._late.isdisjoint(bucket.indices)

    def _update_withheld(self) -> None:
        with self._updater.lane.active():
            held, self._withheld = self._withheld, []
            for bucket in held:
                self._update(bucket)

    def _update(self, bucket: Bucket) -> None:
        ready = bucket.ready()
        if ready is None:
            return
        self._updater.pass_fence(bucket.number)  # first: others may go on while this one waits
        if self._keeps_gradients and bucket.written():
            raise self._broken(refusals.gradient_changed(bucket.number, bucket.names))
        self._refuse_meddling(bucket)
        moved = bucket.moved()
        if moved is not None:
            raise self._broken(refusals.weight_changed(moved))
        self._updated_at.append(self._updater.update(ready))
        if not self._keeps_gradients:  # the optimizer may have written to this rank's own
            bucket.note_versions()

    def _reduce_dormant(self) -> None:
        """Some rank has gradients outside the plan: all ranks know, and average them now."""
        assert self._buckets is not None
        for bucket in self._buckets.average_dormant(self._updater.step):
            self._woken += [slot.index for slot in bucket.present]
            if self._context.mode == "layerwise":
                self._update(bucket)

    # -- end of a step -----------------------------------------------------------------------

    def _apply(self) -> StepOutcome:
        context = self._context
        assert self._buckets is not None
        if context.mode != "layerwise":
            self._buckets.look_again()
            ready = [r for b in self._buckets if (r := b.ready()) is not None]
            return apply_all(context, self._updater, ready, contributed=bool(self._fired))
        for bucket in self._buckets:
            if bucket.touched() if self._keeps_gradients else bucket.shown_changed():
                raise self._broken(refusals.gradient_changed(bucket.number, bucket.names))
        option = context.views.changed_option()
        if option is not None:
            raise self._broken(refusals.option_changed(option))
        weight = self._updater.changed_weight()
        if weight is not None:
            raise self._broken(refusals.weight_changed(weight))
        context.views.after_step()
        return StepOutcome(skipped=not any(b.present for b in self._buckets))

    def _check_replaced(self) -> None:
        """A replaced layer shows in parameters that get no gradient; others are just unused."""
        if self._ever_absent.issuperset(self._absent):
            return
        self._ever_absent.update(self._absent)
        replaced = self._members.replaced()
        if replaced is not None:
            raise self._broken(replaced)

    def _count(self) -> None:
        self.stats.count_step(self._updated_at, self._last_gradient)
        assert self._plan is not None
        fitted = self._replanner.note(
            self._absent, self._woken, disorder=self._disorder, empty_plan=not self._plan.buckets
        )
        self.stats.misfits += not fitted

    # -- the plan ----------------------------------------------------------------------------

    @property
    def _planned(self) -> list[Bucket]:
        return [] if self._buckets is None else self._buckets.planned

    def _make_plan(self, reason: str) -> None:
        context = self._context
        if self._plan is None:
            context.group.check_same("set of trained parameters", context.names)
            mine = self._predicted
        else:
            came = [*self._fired, *self._woken]  # those of accumulating passes had no hook
            mine = observed_order(self._plan, came, self._replanner.silent())
        self._predicted = []
        self._plan = agree_plan(context, mine, reason)
        self._updater.pass_all_fences()
        context.views.forget()
        self._release_buckets()
        self._buckets = BucketSet(context, self._plan, self._settled_for_reader)
        self._careful = True
        self._replanner.planned()
        self._tuner.planned()
        self.stats.plans += 1
        announce_plan(context, self._updater.step, self.buckets, reason)

    def _release_buckets(self) -> None:
        """Give up their memory now, as shared memory stays mapped for as long as views of it exist.

        A gradient that somebody still looks at keeps what it needs by itself.
        """
        if self._buckets is not None:
            self._buckets.release()
        self._buckets, self._withheld = None, []

    def _follow_membership(self) -> None:
        """Parameters were frozen, unfrozen or given to the optimizer: start with a new plan."""
        context = self._context
        if not self._members.changed():
            return
        self.wait()
        context.names[:], context.parameters[:] = self._members.read()
        self._detach()
        self.attach()
        self._tuner.restart()
        self._release_buckets()
        self._plan, self._predicted = None, []
        self._ever_absent.clear()

    def _detach(self) -> None:
        if self._on_gradients is not None:
            self._on_gradients.remove()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    # -- small things ------------------------------------------------------------------------

    def _settled_for_reader(self) -> None:
        """Somebody looks at a gradient whose average may be on its way."""
        if self._worker.is_current() or self._phase not in (_Phase.BACKWARD, _Phase.REDUCING):
            return
        self.wait()
        if self._phase is _Phase.BACKWARD:  # under way in another thread
            raise UsageError(TOO_EARLY)

    def _healthy(self) -> bool:
        return self._phase is not _Phase.BROKEN and self._worker.error is None

    def _check(self) -> None:
        self._worker.check()
        if self._phase is _Phase.BROKEN:
            raise UsageError(refusals.broken(self._cause))

    def _tell_peers(self, error: BaseException) -> None:
        if not isinstance(error, PeerFailed):
            self._context.group.board.post(f"{type(error).__name__}: {error}")

    @contextmanager
    def _breaking(self) -> Iterator[None]:
        """An error inside leaves a step that nobody may end as if nothing had happened."""
        try:
            yield
        except BaseException as error:
            if self._phase is not _Phase.BROKEN:
                self._cause = f"{type(error).__name__}: {error}"
                self._phase = _Phase.BROKEN
                self._tell_peers(error)
            raise

    def _broken(self, message: str) -> UsageError:
        self._cause = message
        self._phase = _Phase.BROKEN
        self._context.group.board.post(message)
        return UsageError(message)

    def _trace_span(self, name: str, start: int, end: int | None = None) -> None:
        trace = self._context.trace
        if trace.on and start:
            trace.complete(name, start, end or time.perf_counter_ns(), step=self._updater.step)
