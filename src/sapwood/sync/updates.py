"""Updating one bucket: wait for its fence, run the optimizer, announce the new values."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.autograd.graph import increment_version

from sapwood.events import (
    BackwardBegan,
    Fence,
    StateReplacing,
    StepBegan,
    TensorUpdated,
    UpdatedTensor,
)
from sapwood.runtime import faults
from sapwood.runtime.device import Lane
from sapwood.state.optimizers import optimizer_tensors
from sapwood.sync.base import Context, SyncStats
from sapwood.sync.optim import OptimizerView
from sapwood.sync.reads import WeightReads

__all__ = ["Ready", "Updater"]


@dataclass(frozen=True, slots=True)
class Ready:
    """A bucket whose averaged gradients can be applied."""

    bucket: int
    optimizer: OptimizerView
    indices: Sequence[int]
    """The parameters some rank had a gradient for."""


# Parameters and gradients may have classes that notice reads; the engine's own are not meant.
_unnoticed = torch._C.DisableTorchFunctionSubclass


class Updater:
    """Shared by all engines, so that fences, generations and events are the same in each."""

    def __init__(self, context: Context, stats: SyncStats) -> None:
        """Start in step 1, with every generation at 0."""
        self.step = 1
        self.generations: Counter[str] = Counter()
        self.lane = Lane(context.group.device)
        self.versions: dict[int, int] = {}
        """The version counter of each parameter after its update in this step, by index."""
        self.reads: WeightReads | None = None
        """Told of every update, before it begins."""
        self._context = context
        self._stats = stats
        self._fences: dict[int, Fence] = {}
        self._begun = 0
        context.events.subscribe(StateReplacing, self._state_goes, name="fences")

    def begin_step(self) -> None:
        """Announce the step, once: by its first forward, or else by its first gradient."""
        if self._begun != self.step:
            self._begun = self.step
            if self._context.events.wants(StepBegan):
                self._context.events.publish(StepBegan(step=self.step))

    def begin_backward(self) -> None:
        """Announce the first gradient of a step, before anything is updated."""
        if self._context.events.wants(BackwardBegan):
            self._context.events.publish(BackwardBegan(step=self.step))

    def update(self, ready: Ready) -> int:
        """Apply averaged gradients; returns when it was done (perf_counter_ns).

        Raises:
            FenceTimeout: a subscriber held the bucket's last version for too long.
        """
        bucket = ready.bucket
        self.pass_fence(bucket)
        faults.point("sync.update", step=self.step, bucket=bucket)
        if self.reads is not None:
            self.reads.seal(ready.indices, updated=True)
        start = time.perf_counter_ns()
        with _unnoticed():
            updated = [self._context.parameters[i] for i in ready.indices]
            # Before and after: an alias must not pass for unchanged while it is being written.
            increment_version(updated)
            ready.optimizer.step()
            increment_version(updated)
            versions = (parameter._version for parameter in updated)
            self.versions.update(zip(ready.indices, versions, strict=True))
        done = time.perf_counter_ns()
        self.announce(bucket, ready.indices)
        trace = self._context.trace
        if trace.on:
            trace.complete("update", start, done, lane="update", step=self.step, bucket=bucket)
            trace.instant("tensor_updated", lane="update", step=self.step, bucket=bucket)
        return done

    def trace_reduced(self, bucket: int, launched: int, nbytes: int) -> None:
        """Leave a span for an average that has just come."""
        trace = self._context.trace
        if trace.on:
            facts = {"step": self.step, "bucket": bucket, "bytes": nbytes}
            trace.complete("reduce", launched, time.perf_counter_ns(), lane="comm", **facts)

    def changed_weight(self) -> str | None:
        """The name of a parameter that somebody changed after its update in this step."""
        parameters = self._context.parameters
        for index, version in self.versions.items():
            if parameters[index]._version != version:
                return self._context.names[index]
        return None

    def end_step(self) -> None:
        """Count on to the next step."""
        self.versions.clear()
        self.step += 1

    def announce(self, bucket: int, indices: Sequence[int]) -> None:
        """Count the update of these parameters and publish it."""
        self._stats.updates += 1
        for index in indices:
            self.generations[self._context.names[index]] += 1
        if indices and self._context.events.wants(TensorUpdated):
            with _unnoticed():
                event = self._event(bucket, indices)
            self._context.events.publish(event)

    def _event(self, bucket: int, indices: Sequence[int]) -> TensorUpdated:
        context = self._context
        fence = Fence(f"bucket {bucket} of step {self.step}")
        self._fences[bucket] = fence
        return TensorUpdated(
            step=self.step,
            bucket=bucket,
            fence=fence,
            marker=self.lane.mark(),
            tensors=tuple(
                UpdatedTensor(
                    name=context.names[i],
                    tensor=context.parameters[i].detach(),
                    state=optimizer_tensors(context.views.optimizer, context.parameters[i]),
                    generation=self.generations[context.names[i]],
                )
                for i in indices
            ),
        )

    def pass_fence(self, bucket: int) -> None:
        """Wait for the holds on the bucket's last version, and attribute the wait."""
        fence = self._fences.get(bucket)
        if fence is None:
            return
        start = time.perf_counter_ns()
        waited = fence.close(self._context.settings.fence_timeout)
        del self._fences[bucket]
        for owner, seconds in waited.items():
            total = self._stats.fence_seconds.get(owner, 0.0)
            self._stats.fence_seconds[owner] = total + seconds
        if waited and self._context.trace.on:
            self._context.trace.complete(
                "fence",
                start,
                time.perf_counter_ns(),
                lane="update",
                step=self.step,
                bucket=bucket,
                owners=sorted(waited),
            )

    def pass_all_fences(self) -> None:
        """Wait for every hold: before bucket numbers change their meaning, or weights the state."""
        for bucket in list(self._fences):
            self.pass_fence(bucket)

    def _state_goes(self, event: StateReplacing) -> None:
        """To set weights to others is an update as well: whoever holds their values, a fork's
        donor for one, would send a mixture.
        """
        try:
            self.pass_all_fences()
        except Exception as error:
            event.problems.append(error)
