"""The user's optimizer, a bucket at a time, with its own arithmetic and its own state.

A view is the same optimizer seeing only some of its parameters: it shares the state and follows
the hyperparameters of the original, so ``optimizer.state_dict()``, schedulers and checkpoints
work as if ``optimizer.step()`` had been called.
"""

from __future__ import annotations

import copy
import inspect
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import optimizer as torch_optimizer

from sapwood.errors import ConfigError, UsageError

__all__ = ["OptimizerView", "UpdateMode", "Views", "choose_mode"]

UpdateMode = Literal["layerwise", "deferred", "whole"]

_PER_PARAMETER = tuple(
    getattr(torch.optim, name)
    for name in (
        "ASGD",
        "Adadelta",
        "Adafactor",
        "Adagrad",
        "Adam",
        "AdamW",
        "Adamax",
        "Muon",
        "NAdam",
        "RAdam",
        "RMSprop",
        "Rprop",
        "SGD",
    )
)
# Where torch's foreach loop is bit for bit its plain loop, but crosses the interpreter less often.
_SAME_AS_FOREACH = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW)
_SAME_DTYPES = (torch.float32, torch.float64)
_PLAIN = (bool, int, float, str, tuple, type(None))
# All wrappers that torch puts around a step share this code. Not by their mark ``hooked``, which
# functools.wraps copies onto decorators of others.
_HOOKED = torch.optim.Optimizer.profile_hook_step(lambda: None).__code__
# Attributes that each view has for itself, or that torch sets only to warn once.
_OF_A_VIEW = {
    "param_groups",
    "state",
    "step",
    "_optimizer_step_pre_hooks",
    "_optimizer_step_post_hooks",
    "_warned_capturable_if_run_uncaptured",
}


def is_per_parameter(optimizer: torch.optim.Optimizer) -> bool:
    """Whether updating some parameters now and the others later equals updating all at once."""
    declared = getattr(optimizer, "per_parameter", None)
    return _is_torchs(optimizer) if declared is None else bool(declared)


def _is_torchs(optimizer: torch.optim.Optimizer) -> bool:
    """Whether it steps with the code of one of torch's optimizers that are known here."""
    own = inspect.unwrap(type(optimizer).step)
    return any(
        isinstance(optimizer, kind) and own is inspect.unwrap(kind.step) for kind in _PER_PARAMETER
    )


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
    _refuse_by_trial(optimizer)
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
    if _runs_global_hooks(optimizer):
        return (
            f"{kind}.step calls the step of the class it is derived from, where torch runs the "
            "hooks for all optimizers (register_optimizer_step_pre_hook, ..._post_hook), which "
            "expect the whole optimizer"
        )
    return None


def _runs_global_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Whether global hooks may run also beneath the wrapper that a view leaves out."""
    if not _global_hooks() or _is_torchs(optimizer):
        return False
    owners = [kind for kind in type(optimizer).__mro__ if "step" in vars(kind)]
    return any(kind is not torch.optim.Optimizer for kind in owners[1:])


def _global_hooks() -> bool:
    return bool(
        torch_optimizer._global_optimizer_pre_hooks or torch_optimizer._global_optimizer_post_hooks
    )


def _beneath_hooks(optimizer: torch.optim.Optimizer) -> Callable[[torch.optim.Optimizer], Any]:
    """The step without torch's wrapper, which runs global hooks: they are for whole steps."""
    step: Any = type(optimizer).step
    while getattr(step, "__code__", None) is _HOOKED:
        step = step.__wrapped__
    return step  # type: ignore[no-any-return]


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
        self._clone = _shallow(views.optimizer, [g for _, g in self._positions])
        self._step = _beneath_hooks(views.optimizer)
        self.follow()

    def follow(self) -> None:
        """Take over the original's hyperparameters and state as they are now."""
        original = self._views.optimizer
        self._clone.state = original.state
        if self._views.foreign:
            self._clone.__dict__.update(_attributes(original))
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
        before = _kept(self._clone)
        self._step(self._clone)
        changed = _changed(before, _kept(self._clone))
        if changed is not None:
            raise _not_per_parameter(self._views.optimizer, f"its step has changed {changed}")


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
        self.foreign = not _is_torchs(optimizer)
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
            isinstance(self.optimizer, _PER_PARAMETER)
            and not _runs_global_hooks(self.optimizer)  # they are not meant for a trial
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
            self._writes[key] = _tried_to_write(self.optimizer, options)
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
        if self._mode != "whole" and _runs_global_hooks(self.optimizer):
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
    return bool(now == before)


def _tried_to_write(optimizer: torch.optim.Optimizer, options: dict[str, Any]) -> bool:
    """Whether two steps on a small parameter of the same kind write to its gradient."""
    try:
        trial = _small_copy(optimizer, [options])
        (parameter,) = trial.param_groups[0]["params"]
        for gradients in _try_steps(trial):
            if parameter.grad._version != 0 or not torch.equal(parameter.grad, gradients[0]):
                return True
    except Exception:  # whatever it is, the real step will tell
        return True
    return False


def _refuse_by_trial(optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer that keeps something that is not the state of one parameter.

    Its views would lose it, being copies, or change it once per bucket instead of once per step.
    """
    if _is_torchs(optimizer):
        return
    inner = _optimizer_inside(optimizer)
    if inner is not None:
        raise _not_per_parameter(optimizer, f"self.{inner} holds another optimizer")
    try:
        trial = _small_copy(optimizer, optimizer.param_groups)
    except Exception:  # something that cannot be copied; the views watch the real steps
        return
    before = _kept(trial)
    with suppress(Exception):  # it may not like small parameters; what it did until then counts
        for _ in _try_steps(trial):
            pass
    changed = _changed(before, _kept(trial))
    if changed is not None:
        raise _not_per_parameter(optimizer, f"its step changes {changed}")


def _not_per_parameter(optimizer: torch.optim.Optimizer, found: str) -> UsageError:
    return UsageError(
        f"{type(optimizer).__name__} says per_parameter = True, but {found}, which is not the "
        "state of one parameter: it would be lost, or changed once per bucket instead of once per "
        "step. Remove per_parameter = True; then the optimizer updates all weights in one call"
    )


def _small_copy(
    optimizer: torch.optim.Optimizer, groups: Sequence[dict[str, Any]]
) -> torch.optim.Optimizer:
    """The optimizer with these groups, and a small parameter in each."""
    small = [[_small(group["params"][0])] if group["params"] else [] for group in groups]
    options = [{**group, "params": p} for group, p in zip(groups, small, strict=True)]
    if not _is_torchs(optimizer):
        return _deep(optimizer, options)
    trial = _shallow(optimizer, options)
    trial.state = defaultdict(dict)
    return trial


def _deep(
    optimizer: torch.optim.Optimizer, groups: Sequence[dict[str, Any]]
) -> torch.optim.Optimizer:
    """A clone that shares nothing with the original, whatever a foreign step changes in place."""
    if _optimizer_inside(optimizer) is not None:
        raise UsageError("an optimizer that steps another one cannot be tried out")
    clone = _shallow(optimizer, [])
    # Where the original's parameters turn up, copies would need the memory of the model.
    memo: dict[int, Any] = {id(optimizer): clone}
    stand_in = next(p for group in groups for p in group["params"])
    for group in optimizer.param_groups:
        memo.update((id(p), stand_in) for p in group["params"])
    memo.update((id(p), p) for group in groups for p in group["params"])
    clone.__dict__.update(copy.deepcopy(_attributes(optimizer), memo))
    clone.state = defaultdict(dict, copy.deepcopy(_common_state(optimizer), memo))
    clone.param_groups = copy.deepcopy(list(groups), memo)
    return clone


def _small(like: Tensor) -> nn.Parameter:
    values = torch.linspace(-1.0, 1.0, 8, device=like.device)
    return nn.Parameter(values.reshape(2, 4).to(like.dtype))


def _try_steps(trial: torch.optim.Optimizer) -> Iterator[list[Tensor]]:
    """Step twice; after each, the gradients as they were before."""
    step = _beneath_hooks(trial)
    parameters = [p for group in trial.param_groups for p in group["params"]]
    start = [p.detach().clone() for p in parameters]
    for factor in (0.5, -0.25):
        for parameter, values in zip(parameters, start, strict=True):
            parameter.grad = values * factor
        with _same_random_numbers(parameters):
            step(trial)
        yield [values * factor for values in start]


def _same_random_numbers(parameters: Sequence[Tensor]) -> Any:
    """A context after which the user's random numbers are those of a run without a trial."""
    devices = {p.device for p in parameters if p.device.type != "cpu"}
    kind = next((device.type for device in devices), "cuda")
    return torch.random.fork_rng(devices=list(devices), device_type=kind)


def _optimizer_inside(optimizer: torch.optim.Optimizer) -> str | None:
    """The attribute that holds another optimizer, with parameters that no view leaves out."""
    for name, value in _attributes(optimizer).items():
        inside = value.values() if isinstance(value, Mapping) else value
        held = inside if isinstance(value, (Mapping, list, tuple)) else (value,)
        if any(isinstance(thing, torch.optim.Optimizer) for thing in held):
            return name
    return None


def _attributes(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """What the instance holds that is not different in each view."""
    return {k: v for k, v in vars(optimizer).items() if k not in _OF_A_VIEW}


def _kept(optimizer: torch.optim.Optimizer) -> dict[tuple[str, int], Any]:
    """What an optimizer keeps beside the state of its parameters, as it is now.

    By its name for people, with the number of the group. Objects with insides of their own are
    only told apart from others: what changes inside them is not seen.
    """
    kept = {
        (f"group[{name!r}]", number): _as_now(value)
        for number, group in enumerate(optimizer.param_groups)
        for name, value in group.items()
        if name != "params"
    }
    for name, value in _attributes(optimizer).items():
        kept[f"self.{name}", 0] = _as_now(value)
    for key, value in _common_state(optimizer).items():
        kept[f"self.state[{key!r}]", 0] = _as_now(value)
    return kept


def _common_state(optimizer: torch.optim.Optimizer) -> dict[Any, Any]:
    """The state that is not of one parameter; torch's own optimizers have none."""
    state: dict[Any, Any] = optimizer.state
    return {key: value for key, value in state.items() if not isinstance(key, Tensor)}


def _as_now(value: Any, depth: int = 4) -> Any:
    """What tells whether a value was changed, also in place.

    Parameters are there to be changed, and what is kept under one as the key is its own.
    """
    if isinstance(value, Tensor):
        return value if value.requires_grad else (value, value._version)
    if depth and isinstance(value, Mapping):
        common = ((key, v) for key, v in value.items() if not isinstance(key, Tensor))
        return {key: _as_now(v, depth - 1) for key, v in common}
    if depth and isinstance(value, (list, tuple)):
        return [_as_now(inside, depth - 1) for inside in value]
    return set(value) if isinstance(value, set) else value


def _changed(before: dict[tuple[str, int], Any], after: dict[tuple[str, int], Any]) -> str | None:
    """The name of something that was changed, made or removed; else None."""
    missing = object()
    for key in (*after, *before):
        was, now = before.get(key, missing), after.get(key, missing)
        try:
            same = was is now or bool(was == now)
        except Exception:  # arrays, which are compared element by element: not the same objects
            same = False
        if not same:
            return key[0]
    return None


def _shallow(
    optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]]
) -> torch.optim.Optimizer:
    clone: torch.optim.Optimizer = object.__new__(type(optimizer))
    clone.__dict__.update(optimizer.__dict__)
    # A scheduler counts steps on the instance; the user's hooks belong to the whole step.
    clone.__dict__.pop("step", None)
    clone.param_groups = groups
    clone._optimizer_step_pre_hooks = OrderedDict()
    clone._optimizer_step_post_hooks = OrderedDict()
    return clone
