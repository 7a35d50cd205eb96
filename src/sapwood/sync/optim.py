"""The user's optimizer, a bucket at a time, with its own arithmetic and its own state.

A view is the same optimizer seeing only some of its parameters: it shares the state and follows
the hyperparameters of the original, so ``optimizer.state_dict()``, schedulers and checkpoints
work as if ``optimizer.step()`` had been called.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import optimizer as torch_optimizer

from sapwood.errors import ConfigError, UsageError
from sapwood.sync.foreign import (
    PER_PARAMETER,
    attributes,
    beneath_hooks,
    changed,
    clone_of,
    is_torchs,
    kept,
    not_per_parameter,
    refuse_by_trial,
    runs_global_hooks,
    tried_to_write,
)

__all__ = ["OptimizerView", "UpdateMode", "Views", "choose_mode"]

UpdateMode = Literal["layerwise", "deferred", "whole"]

# Where torch's foreach loop is bit for bit its plain loop, but crosses the interpreter less often.
_SAME_AS_FOREACH = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW)
_SAME_DTYPES = (torch.float32, torch.float64)
_PLAIN = (bool, int, float, str, tuple, type(None))


def is_per_parameter(optimizer: torch.optim.Optimizer) -> bool:
    """Whether updating some parameters now and the others later equals updating all at once."""
    declared = getattr(optimizer, "per_parameter", None)
    return is_torchs(optimizer) if declared is None else bool(declared)


def choose_mode(
    optimizer: torch.optim.Optimizer, wanted: str, *, clips: bool, scales: bool
) -> tuple[UpdateMode, str]:
    """The update mode and the reason for it; a setting is obeyed or refused, never ignored.

    Raises:
        ConfigError: the wanted mode is not possible.
        UsageError: the optimizer says ``per_parameter = True``, and a trial shows otherwise.
    """
    needs_all = [
        text
        for needed, text in (
            (clips, "clip_grad_norm needs the norm of all gradients"),
            (scales, "the gradient scaler looks at all gradients for inf and NaN"),
            (bool(optimizer._optimizer_step_pre_hooks), "a step pre-hook expects all gradients"),
            (
                bool(torch_optimizer._global_optimizer_pre_hooks),
                "a step pre-hook for all optimizers (register_optimizer_step_pre_hook) expects all "
                "gradients",
            ),
        )
        if needed
    ]
    kind = type(optimizer).__name__
    _refuse_closure(optimizer)
    only_whole = _why_only_whole(optimizer)
    if only_whole is not None:
        if wanted == "layerwise":
            raise ConfigError(f"update='layerwise' is not possible: {only_whole}")
        return "whole", only_whole
    refuse_by_trial(optimizer)
    if wanted == "layerwise" and needs_all:
        raise ConfigError(
            f"update='layerwise' is not possible: {needs_all[0]}; use update='deferred' or 'auto'"
        )
    if wanted == "deferred" or needs_all:
        return "deferred", needs_all[0] if needs_all else "asked for"
    return "layerwise", f"{kind} updates each parameter by itself"


def _why_only_whole(optimizer: torch.optim.Optimizer) -> str | None:
    kind = type(optimizer).__name__
    if not is_per_parameter(optimizer):
        return (
            f"{kind} is not known to update each parameter by itself (set per_parameter = True on "
            "the optimizer if it does)"
        )
    if runs_global_hooks(optimizer):
        return (
            f"{kind}.step calls the step of the class it is derived from, where torch runs the "
            "hooks for all optimizers (register_optimizer_step_pre_hook, ..._post_hook), which "
            "expect the whole optimizer"
        )
    return None


def _refuse_closure(optimizer: torch.optim.Optimizer) -> None:
    own = inspect.unwrap(type(optimizer).step)
    closure = inspect.signature(own).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ConfigError(
            f"{type(optimizer).__name__} calls the model itself through a closure, which cannot "
            "run inside a step of a Run; use an optimizer whose step() needs no closure"
        )


class OptimizerView:
    """An optimizer that sees only some of its parameters."""

    def __init__(self, views: Views, parameters: Sequence[nn.Parameter]) -> None:
        """Made by ``Views.of``."""
        self.parameters = list(parameters)
        self._views = views
        self._exact_foreach = all(p.dtype in _SAME_DTYPES for p in parameters)
        members = {id(p) for p in parameters}
        self._positions = [
            (number, {**group, "params": [p for p in group["params"] if id(p) in members]})
            for number, group in enumerate(views.optimizer.param_groups)
        ]
        self._positions = [(n, g) for n, g in self._positions if g["params"]]
        self._clone = clone_of(views.optimizer, [g for _, g in self._positions])
        self._step = beneath_hooks(views.optimizer)
        self.follow()

    def follow(self) -> None:
        """Take over the original's hyperparameters and state as they are now."""
        original = self._views.optimizer
        self._clone.state = original.state
        if self._views.foreign:
            self._clone.__dict__.update(attributes(original))
        for number, mine in self._positions:
            theirs = original.param_groups[number]
            mine.update({k: v for k, v in theirs.items() if k != "params"})
            mine.update(self._views.kernel(theirs, exact_foreach=self._exact_foreach))

    def step(self) -> None:
        """Update this view's parameters that have a gradient.

        Raises:
            UsageError: the optimizer has changed what is not the state of a parameter.
        """
        if not self._views.foreign:
            self._step(self._clone)
            return
        # A trial cannot show everything: it may have failed, or something changes later.
        before = kept(self._clone)
        self._step(self._clone)
        found = changed(before, kept(self._clone))
        if found is not None:
            raise not_per_parameter(self._views.optimizer, f"its step has changed {found}")


class Views:
    """Makes views of one optimizer and keeps them in step with it."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, fused: bool | None, mode: UpdateMode
    ) -> None:
        """``fused``: True or False overrides the optimizer's choice of kernel, None keeps it."""
        if fused and "fused" not in optimizer.defaults:
            raise ConfigError(
                f"fused=True, but torch has no fused {type(optimizer).__name__}; leave fused away"
            )
        self.optimizer = optimizer
        self.fused = fused
        self.foreign = not is_torchs(optimizer)
        """Whether the step is code that is not known here, so that views watch it."""
        self._mode = mode
        self._made: list[OptimizerView] = []
        self._writes: dict[Any, bool] = {}
        self._noted: list[dict[str, Any]] = []
        self._stepping = False
        self._guard = optimizer.register_step_pre_hook(self._refuse_foreign_step)

    def release(self) -> None:
        """Let the user call ``optimizer.step()`` again."""
        self._guard.remove()

    def _refuse_foreign_step(self, *_: Any) -> None:
        if not self._stepping:
            raise UsageError(
                "optimizer.step() was called, but the run updates the weights itself; call "
                "run.step() in its place (and run.close() before using the optimizer alone)"
            )

    def whole_step(self) -> None:
        """Run the original's step on all parameters at once, hooks and all."""
        self._stepping = True
        try:
            type(self.optimizer).step(self.optimizer)
        finally:
            self._stepping = False

    def before_step(self) -> None:
        """Run the user's step pre-hooks, global ones first, as torch does."""
        own = self.optimizer._optimizer_step_pre_hooks
        hooks = [hook for key, hook in own.items() if key != self._guard.id]
        for hook in (*torch_optimizer._global_optimizer_pre_hooks.values(), *hooks):
            given: tuple[Any, Any] = (self.optimizer,), {}
            wanted = hook(self.optimizer, *given)
            if wanted is not None and wanted != given:
                raise UsageError(
                    "a step pre-hook of the optimizer returned other arguments for step(), which "
                    "is called bucket by bucket without any; let the hook return None"
                )

    def after_step(self) -> None:
        """Run the user's step post-hooks, global ones last, as torch does."""
        own = self.optimizer._optimizer_step_post_hooks.values()
        for hook in (*own, *torch_optimizer._global_optimizer_post_hooks.values()):
            hook(self.optimizer, (self.optimizer,), {})

    def of(self, parameters: Sequence[nn.Parameter]) -> OptimizerView:
        """A view of these parameters."""
        view = OptimizerView(self, parameters)
        self._made.append(view)
        return view

    def forget(self) -> None:
        """Drop all views, before new buckets are laid out."""
        self._made.clear()

    @property
    def keeps_gradients(self) -> bool:
        """Whether the kernels in use are known not to write to gradients.

        Then anybody else who does can be found out, and gradients may lie in memory that other
        ranks read. Tried out on a small tensor, once for each set of options.
        """
        return (
            isinstance(self.optimizer, PER_PARAMETER)
            and not runs_global_hooks(self.optimizer)  # they are not meant for a trial
            and not any(self._writes_gradients(group) for group in self.optimizer.param_groups)
        )

    def _writes_gradients(self, group: dict[str, Any]) -> bool:
        if not group["params"]:
            return False
        like = group["params"][0]
        key = (
            like.dtype,
            like.device.type,
            *((k, v) for k, v in group.items() if k not in ("lr", "initial_lr") and _is_plain(v)),
        )
        if key not in self._writes:
            exact = like.dtype in _SAME_DTYPES
            options = {**group, **self.kernel(group, exact_foreach=exact)}
            self._writes[key] = tried_to_write(self.optimizer, options)
        return self._writes[key]

    def note_options(self) -> None:
        """Remember the hyperparameters that this step's updates use."""
        self._noted = [_options(group) for group in self.optimizer.param_groups]

    def changed_option(self) -> str | None:
        """A hyperparameter that was changed since ``note_options``, for people; else None."""
        for number, (group, noted) in enumerate(
            zip(self.optimizer.param_groups, self._noted, strict=False)
        ):
            for name, value in _options(group).items():
                if not _same(value, noted.get(name)):
                    return f"{name!r} of group {number}"
        return None

    def follow(self) -> None:
        """Call at the start of a step: a scheduler or the user may have changed hyperparameters."""
        self._refuse_late_hooks()
        for view in self._made:
            view.follow()
        self.note_options()

    def _refuse_late_hooks(self) -> None:
        where = None
        if len(self.optimizer._optimizer_step_pre_hooks) > 1:
            where = "on the optimizer"
        elif torch_optimizer._global_optimizer_pre_hooks:
            where = "for all optimizers (register_optimizer_step_pre_hook)"
        if self._mode == "layerwise" and where is not None:
            raise UsageError(
                f"a step pre-hook was registered {where} after the Run was made; it expects all "
                "gradients before the update: register it before, or use update='deferred'"
            )
        if self._mode != "whole" and runs_global_hooks(self.optimizer):
            raise UsageError(
                "a step hook was registered for all optimizers after the Run was made; "
                f"{type(self.optimizer).__name__} would run it for each bucket: register it before"
            )

    def kernel(self, group: dict[str, Any], *, exact_foreach: bool) -> dict[str, Any]:
        """The kernel settings to use for a group."""
        if self.fused is not None and "fused" in group:
            return {"fused": self.fused, "foreach": False if self.fused else group.get("foreach")}
        undecided = group.get("fused") is None and group.get("foreach") is None
        if undecided and exact_foreach and type(self.optimizer) in _SAME_AS_FOREACH:
            return {} if _foreach_differs(group) else {"foreach": True}
        return {}


def _foreach_differs(group: dict[str, Any]) -> bool:
    """Whether torch's foreach loop refuses this group, or writes to its gradients."""
    return (
        isinstance(group.get("lr"), Tensor)
        or bool(group.get("differentiable"))
        or (bool(group.get("nesterov")) and not group.get("weight_decay"))
    )


def _is_plain(value: Any) -> bool:
    return isinstance(value, _PLAIN)


def _options(group: dict[str, Any]) -> dict[str, Any]:
    """A group's options; a tensor with its version, which tells of changes in place."""
    return {
        name: (value, value._version) if isinstance(value, Tensor) else value
        for name, value in group.items()
        if name != "params"
    }


def _same(now: Any, before: Any) -> bool:
    if isinstance(now, tuple) and isinstance(before, tuple) and len(now) == len(before):
        return all(_same(a, b) for a, b in zip(now, before, strict=True))
    if isinstance(now, Tensor) or isinstance(before, Tensor):
        return now is before
    if now is before:
        return True
    try:
        return bool(now == before)
    except (TypeError, ValueError, RuntimeError):  # an array: it can be told apart by itself only
        return False
