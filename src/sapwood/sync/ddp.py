"""DistributedDataParallel with a communication hook: for compatibility, and as a reference.

DDP owns the buckets (one large one in the first step, its own from the second on), the order and
the waiting: ``backward`` returns only when everything is averaged and applied. Parameters without
a gradient are DDP's error. Update arithmetic, fences and events are the same as in ``layerwise``.
"""

# No postponed annotations here: DDP compares the hook's annotations with the classes themselves.
import time
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from sapwood.errors import PeerFailed, UsageError
from sapwood.events import PlanChanged
from sapwood.runtime import faults
from sapwood.runtime.group import Pending
from sapwood.runtime.stores import GradBucket
from sapwood.runtime.worker import Worker
from sapwood.sync.base import Context, StepOutcome, SyncStats
from sapwood.sync.buffers import BufferSync
from sapwood.sync.deferred import apply_all
from sapwood.sync.gradients import changed_behind, present_as
from sapwood.sync.guard import BackwardGuard, in_backward, nested
from sapwood.sync.hooks import ModuleHook
from sapwood.sync.members import Members
from sapwood.sync.optim import OptimizerView
from sapwood.sync.reads import WeightReads
from sapwood.sync.refusals import FORGOTTEN, option_changed, sparse, weight_changed
from sapwood.sync.updates import Ready, Updater

__all__ = ["Ddp"]


class Ddp:
    """DDP averages; Sapwood updates and announces. Fulfils ``Synchroniser``."""

    def __init__(self, context: Context) -> None:
        """Wrap the model; ``attach`` installs the hook."""
        settings = context.settings
        self.stats = SyncStats()
        self._context = context
        with warnings.catch_warnings():
            # forward_sync_buffers, which torch asks for instead, would still send buffers here.
            warnings.filterwarnings("ignore", ".*broadcast_buffers", FutureWarning)
            self._wrapped = DistributedDataParallel(
                context.model,
                process_group=context.group.process_group,
                init_sync=False,  # the Run has given every rank rank 0's values, of any dtype
                broadcast_buffers=False,  # ours: also when one rank alone evaluates, nobody waits
                gradient_as_bucket_view=True,
                bucket_cap_mb=settings.bucket_mb or 25.0,
            )
        self.model: nn.Module = self._wrapped
        self._members = Members(context.model, context.views.optimizer)
        self._index = {id(p): i for i, p in enumerate(context.parameters)}
        self._updater = Updater(context, self.stats)
        if context.mode == "layerwise":
            self._updater.reads = WeightReads(context, self._broken)
        self._buffers = BufferSync(context)
        self._worker = Worker("sapwood-update")
        self._views: dict[tuple[int, ...], OptimizerView] = {}
        self._layout: list[tuple[int, ...]] = []
        self._ready: list[Ready] = []
        self._withheld: list[Ready] = []
        self._late: set[int] = set()
        self._noted: dict[str, _Noted] = {}
        self._armed = False
        self._error: BaseException | None = None
        self._in_step = False
        self._in_backward = False
        self._forward_seen = False
        self._careful = True
        self._updated_at: list[int] = []
        self._last_gradient = 0

    @property
    def accumulating(self) -> bool:
        """While True, backward only adds to the local gradients."""
        return not self._wrapped.require_backward_grad_sync

    @accumulating.setter
    def accumulating(self, value: bool) -> None:
        self._wrapped.require_backward_grad_sync = not value

    @property
    def begun(self) -> bool:
        """Whether weights may be ahead of the last step that ended."""
        return self._in_step

    @property
    def buckets(self) -> tuple[tuple[str, ...], ...]:
        """Names by bucket, as DDP laid them out in the last step."""
        return tuple(tuple(self._context.names[i] for i in b) for b in self._layout)

    def attach(self) -> None:
        """Register the communication hook."""
        self._wrapped.register_comm_hook(None, self._hook)
        inner = self._context.model
        self._handles = [
            inner.register_forward_pre_hook(ModuleHook(self._before_forward)),
            inner.register_forward_hook(ModuleHook(self._after_forward), always_call=True),
        ]

    def generation(self, name: str) -> int:
        """How often a parameter was updated."""
        return self._updater.generations[name]

    def resume_at(self, step: int) -> None:
        """Call the next step ``step``."""
        self.wait()
        self._updater.step = step

    def wait(self) -> None:
        """DDP has waited inside backward; this raises what went wrong there."""
        if self._in_backward and not self._armed and not in_backward():
            self._end()  # every gradient came from nested backward passes
        self._worker.drain(self._context.settings.timeout)
        self._updater.lane.join()
        if self._error is not None:
            raise self._error

    def finish(self) -> StepOutcome:
        """End the step."""
        try:
            return self._finish()
        except BaseException as error:
            # Half an update cannot be repeated: whatever interrupts this breaks the step.
            if self._error is None and not isinstance(error, PeerFailed):
                self._context.group.board.post(f"{type(error).__name__}: {error}")
            self._error = self._error or error
            raise

    def _finish(self) -> StepOutcome:
        self.wait()
        self._check_complete()
        outcome = StepOutcome(skipped=not self._ready)
        if self._context.mode == "layerwise":
            self._check_unchanged()
            self._context.views.after_step()
        else:
            outcome = apply_all(self._context, self._updater, self._ready, contributed=True)
        self._buffers.finish(self._updater.step, agree=self._must_agree_on_buffers())
        self._note_layout()
        self.stats.count_step(self._updated_at, self._last_gradient)
        for parameter in self._context.parameters:
            parameter.grad = None
        self._lay_buckets_out()
        self._ready, self._updated_at, self._in_step = [], [], False
        self._forward_seen = False
        if self._updater.reads is not None:
            self._updater.reads.end_step()
        self._updater.end_step()
        return outcome

    def _lay_buckets_out(self) -> None:
        """DDP does so after the first step, with a message to all ranks.

        It would send it in the next forward, which a rank that has left never comes to.
        """
        try:
            self._wrapped.reducer._rebuild_buckets()
        except RuntimeError as error:
            raise self._context.group.explain("agreeing on DDP's buckets", error) from error

    def _must_agree_on_buffers(self) -> bool:
        if self._context.group.world == 1 or not self._context.settings.broadcast_buffers:
            return False
        outdated = torch.tensor(
            [float(self._buffers.outdated())], device=self._context.group.device
        )
        self._context.group.broadcast(outdated, "asking rank 0 for its buffers").wait()
        return bool(outdated.item())

    def close(self) -> None:
        """End the worker; the hook goes with the wrapper."""
        for handle in self._handles:
            handle.remove()
        if self._updater.reads is not None:
            self._updater.reads.close()
        self._worker.close(timeout=5.0)
        self._context.averaging.averager.close()

    def _check_complete(self) -> None:
        context = self._context
        came = {i for ready in self._ready for i in ready.indices}
        if len(came) == len(context.parameters):
            return
        silent = [
            n for n, p in zip(context.names, context.parameters, strict=True) if p.grad is None
        ]
        if 0 < len(silent) < len(context.names):
            raise self._broken(
                f"{', '.join(silent[:5])} had no gradient in this step; engine='ddp' needs one for "
                "every trained parameter on every rank: freeze them, or use engine='layerwise'"
            )
        raise self._broken(
            "run.step() was called, but no backward() has averaged gradients: with engine='ddp' "
            "every rank must call backward() in every step, on the output of a forward that ran "
            "outside `run.accumulate()`"
        )

    def _check_unchanged(self) -> None:
        views = self._context.views
        option = views.changed_option()
        if option is not None:
            raise self._broken(option_changed(option))
        weight = self._updater.changed_weight()
        if weight is not None:
            raise self._broken(weight_changed(weight))
        for name, parameter in zip(self._context.names, self._context.parameters, strict=True):
            if self._noted[name].changed(parameter):
                raise self._broken(
                    f"the gradient of {name} was changed after backward(), but its weight was "
                    "updated during backward, with the unchanged one; clip with "
                    "Run(clip_grad_norm=...), or use update='deferred'"
                )

    def _before_forward(self, module: nn.Module, args: Any) -> None:
        if in_backward() or not torch.is_grad_enabled():
            return
        if self._members.changed():
            raise self._broken(
                "parameters were frozen, unfrozen or given to the optimizer after the Run was "
                "made, which DistributedDataParallel does not follow: use engine='layerwise', or "
                "make a new Run"
            )
        self._forward_seen = True
        self._updater.begin_step()
        if self._updater.reads is not None:
            self._updater.reads.start_forward()

    def _after_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        if not in_backward() and self._updater.reads is not None:
            self._updater.reads.end_forward()

    def _hook(self, state: Any, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        if bucket.index() == 0:
            self._begin()
        if not self._armed and not nested():
            self._armed = True
            BackwardGuard(self._after_ddp, self._aborted).arm()
        group = self._context.group
        flat = bucket.buffer()
        if flat.layout is not torch.strided:
            (parameter,) = bucket.parameters()  # DDP gives each of these a bucket of its own
            raise self._broken(sparse(self._name_of(parameter)))
        flat.mul_(1.0 / group.world)
        faults.point("sync.launch", step=self._updater.step, bucket=bucket.index())
        self._last_gradient = launched = time.perf_counter_ns()
        pending = group.all_reduce(flat, f"averaging bucket {bucket.index()}")
        # DDP also averages what needs a gradient and is nobody's to update.
        indices = [i for p in bucket.parameters() if (i := self._index.get(id(p))) is not None]
        if self._careful and self._updater.reads is not None:
            self._updater.reads.seal(indices, updated=False)
        number = bucket.index()
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        self._worker.submit(lambda: self._reduced(number, indices, pending, flat, future, launched))
        return future

    def _begin(self) -> None:
        if self.accumulating:
            raise self._broken(
                "with engine='ddp' the forward must run inside `run.accumulate()` as well as its "
                "backward(): DistributedDataParallel decides in forward whether to average"
            )
        if self._in_step:
            raise self._broken(FORGOTTEN)
        self._in_step = self._in_backward = True
        self._context.group.step = self._updater.step
        self._updater.begin_backward()
        self._context.views.follow()
        self._armed = False
        reads = self._updater.reads
        if reads is not None:
            self._late = reads.late
            reads.start_backward()
            reads.say_new("used through detach() or .data")

    def _name_of(self, parameter: torch.Tensor) -> str:
        named = self._context.model.named_parameters()
        return next(name for name, p in named if p is parameter)

    def _after_ddp(self) -> None:
        if self._error is not None:
            raise self._error
        # DDP ends its part in a callback of its own, which was queued later than ours.
        BackwardGuard(self._end, self._aborted).arm()

    def _end(self) -> None:
        """Backward is over: what waited for it can be updated."""
        self._in_backward = self._careful = False
        if self._updater.reads is not None:
            self._updater.reads.end_backward()
        for ready in self._withheld:
            self._updated_at.append(self._updater.update(ready))
        self._withheld = []
        if self._context.mode == "layerwise":
            named = zip(self._context.names, self._context.parameters, strict=True)
            self._noted = {name: _Noted(parameter) for name, parameter in named}

    def _aborted(self) -> None:
        if self._updater.reads is not None:
            self._updater.reads.end_backward()
        self._broken("an exception ended its back-propagation; see the traceback there")

    def _broken(self, message: str) -> UsageError:
        error = UsageError(message)
        self._error = self._error or error
        self._context.group.board.post(message)
        return error

    def _must_wait(self, indices: Sequence[int]) -> bool:
        if not self._in_backward:
            return False
        if self._careful or not self._forward_seen:
            return True
        return not self._late.isdisjoint(indices)

    def _reduced(
        self,
        number: int,
        indices: Sequence[int],
        pending: Pending,
        flat: torch.Tensor,
        future: "torch.futures.Future[torch.Tensor]",
        launched: int,
    ) -> None:
        # A future that is never set would leave DDP waiting for ever, and one with an exception
        # has it raise another; so errors are raised when its part of backward is over.
        try:
            if self._error is not None:
                raise self._error
            with self._updater.lane.active():
                pending.wait()
                self._updater.trace_reduced(number, launched, flat.nbytes)
                if indices:
                    self._averaged(Ready(number, self._view(indices), indices))
        except Exception as error:
            self._error = self._error or error
            if not isinstance(error, PeerFailed):
                self._context.group.board.post(f"{type(error).__name__}: {error}")
        finally:
            future.set_result(flat)

    def _averaged(self, ready: Ready) -> None:
        self._ready.append(ready)
        if self._context.mode != "layerwise":
            return
        if self._must_wait(ready.indices):
            self._withheld.append(ready)
        else:
            self._updated_at.append(self._updater.update(ready))

    def _view(self, indices: Sequence[int]) -> OptimizerView:
        key = tuple(indices)
        if key not in self._views:
            self._updater.pass_all_fences()
            parameters = [self._context.parameters[i] for i in indices]
            self._views[key] = self._context.views.of(parameters)
        return self._views[key]

    def _note_layout(self) -> None:
        layout = [tuple(r.indices) for r in sorted(self._ready, key=lambda r: r.bucket)]
        if layout == self._layout:
            return
        self._layout = layout
        self._views = {key: view for key, view in self._views.items() if key in layout}
        self.stats.plans += 1
        self._context.events.publish(
            PlanChanged(step=self._updater.step, buckets=self.buckets, reason="DDP's own buckets")
        )


class _Noted:
    """A gradient as it was when backward ended."""

    def __init__(self, parameter: nn.Parameter) -> None:
        self._gradient = parameter.grad
        self._version = -1
        if self._gradient is not None:
            self._version = present_as(self._gradient, None)._version

    def changed(self, parameter: nn.Parameter) -> bool:
        gradient = parameter.grad
        if gradient is not self._gradient:
            return True
        return gradient is not None and (
            gradient._version != self._version or changed_behind(gradient)
        )
