"""Updates after backward, for what needs all gradients: clipping, scaling, foreign optimizers."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from sapwood.errors import UsageError
from sapwood.sync.base import Context, StepOutcome
from sapwood.sync.refusals import UNSCALED
from sapwood.sync.updates import Ready, Updater

__all__ = ["apply_all"]


def apply_all(
    context: Context, updater: Updater, ready: Sequence[Ready], *, contributed: bool
) -> StepOutcome:
    """Unscale, clip, then update bucket by bucket, with the same events as during backward.

    ``contributed`` says whether this rank had gradients of its own.
    The scale itself is left as it is: other Runs may still have to unscale with it.
    """
    if not ready:
        return StepOutcome(skipped=True)
    overflow = _unscale(context, contributed=contributed)
    norm = _clip(context)
    if not overflow:
        _update(context, updater, ready)
    return StepOutcome(skipped=overflow, grad_norm=norm)


def _unscale(context: Context, *, contributed: bool) -> bool:
    """Divide gradients by the scale; whether any is inf or NaN (the same on every rank)."""
    scaler = context.scaler
    if scaler is None or not scaler.is_enabled():
        return False
    if scaler._scale is None:
        # torch makes it in scale(), which a rank without a batch has not called yet.
        if contributed:
            raise UsageError(UNSCALED)
        scaler._lazy_init_scale_growth_tracker(context.parameters[0].device)
    optimizer = context.views.optimizer
    state = scaler._per_optimizer_states[id(optimizer)]
    if not state["found_inf_per_device"]:  # the user may have called unscale_ before us
        scaler.unscale_(optimizer)
    found = scaler._found_inf_per_device(optimizer)
    return any(value.item() > 0 for value in found.values())


def _clip(context: Context) -> float | None:
    limit = context.settings.clip_grad_norm
    if limit is None:
        return None
    if math.isinf(limit):
        # Not with clip_grad_norm_: an infinite norm divided by the limit is NaN.
        gradients = [p.grad for p in context.parameters if p.grad is not None]
        return float(torch.nn.utils.get_total_norm(gradients))
    return float(torch.nn.utils.clip_grad_norm_(context.parameters, limit))


def _update(context: Context, updater: Updater, ready: Sequence[Ready]) -> None:
    if context.mode == "whole":
        updater.pass_all_fences()
        context.views.whole_step()
        for bucket in ready:
            updater.announce(bucket.bucket, bucket.indices)
        return
    context.views.before_step()
    context.views.follow()  # a learning rate may have been set since backward
    for bucket in ready:
        updater.update(bucket)
    context.views.after_step()
