"""Optimizers in parts: which are torch's own, and what a step that is not torch's keeps.

Bucket-wise updates step clones of an optimizer that see some of its parameters each. That is right
for torch's own, which keep all their state by parameter. A foreign step is tried out on small
parameters when a run is made, and watched in each real step.
"""

from __future__ import annotations

import copy
import inspect
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import optimizer as torch_optimizer

from sapwood.errors import UsageError

__all__ = [
    "PER_PARAMETER",
    "attributes",
    "beneath_hooks",
    "changed",
    "clone_of",
    "is_torchs",
    "kept",
    "not_per_parameter",
    "refuse_by_trial",
    "runs_global_hooks",
    "tried_to_write",
]

PER_PARAMETER = tuple(
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


def is_torchs(optimizer: torch.optim.Optimizer) -> bool:
    """Whether it steps with the code of one of torch's optimizers that are known here."""
    own = inspect.unwrap(type(optimizer).step)
    return any(
        isinstance(optimizer, kind) and own is inspect.unwrap(kind.step) for kind in PER_PARAMETER
    )


def runs_global_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Whether global hooks may run also beneath the wrapper that a view leaves out."""
    if not _global_hooks() or is_torchs(optimizer):
        return False
    owners = [kind for kind in type(optimizer).__mro__ if "step" in vars(kind)]
    return any(kind is not torch.optim.Optimizer for kind in owners[1:])


def _global_hooks() -> bool:
    return bool(
        torch_optimizer._global_optimizer_pre_hooks or torch_optimizer._global_optimizer_post_hooks
    )


def beneath_hooks(optimizer: torch.optim.Optimizer) -> Callable[[torch.optim.Optimizer], Any]:
    """The step without torch's wrapper, which runs global hooks: they are for whole steps."""
    step: Any = type(optimizer).step
    while getattr(step, "__code__", None) is _HOOKED:
        step = step.__wrapped__
    return step  # type: ignore[no-any-return]


def tried_to_write(optimizer: torch.optim.Optimizer, options: dict[str, Any]) -> bool:
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


def refuse_by_trial(optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer that keeps something that is not the state of one parameter.

    Its views would lose it, being copies, or change it once per bucket instead of once per step.
    """
    if is_torchs(optimizer):
        return
    inner = _optimizer_inside(optimizer)
    if inner is not None:
        raise not_per_parameter(optimizer, f"self.{inner} holds another optimizer")
    try:
        trial = _small_copy(optimizer, optimizer.param_groups)
    except Exception:  # something that cannot be copied; the views watch the real steps
        return
    before = kept(trial)
    with suppress(Exception):  # it may not like small parameters; what it did until then counts
        for _ in _try_steps(trial):
            pass
    found = changed(before, kept(trial))
    if found is not None:
        raise not_per_parameter(optimizer, f"its step changes {found}")


def not_per_parameter(optimizer: torch.optim.Optimizer, found: str) -> UsageError:
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
    if not is_torchs(optimizer):
        return _deep(optimizer, options)
    trial = clone_of(optimizer, options)
    trial.state = defaultdict(dict)
    return trial


def _deep(
    optimizer: torch.optim.Optimizer, groups: Sequence[dict[str, Any]]
) -> torch.optim.Optimizer:
    """A clone that shares nothing with the original, whatever a foreign step changes in place."""
    if _optimizer_inside(optimizer) is not None:
        raise UsageError("an optimizer that steps another one cannot be tried out")
    clone = clone_of(optimizer, [])
    # Where the original's parameters turn up, copies would need the memory of the model.
    memo: dict[int, Any] = {id(optimizer): clone}
    stand_in = next(p for group in groups for p in group["params"])
    for group in optimizer.param_groups:
        memo.update((id(p), stand_in) for p in group["params"])
    memo.update((id(p), p) for group in groups for p in group["params"])
    clone.__dict__.update(copy.deepcopy(attributes(optimizer), memo))
    clone.state = defaultdict(dict, copy.deepcopy(_common_state(optimizer), memo))
    clone.param_groups = copy.deepcopy(list(groups), memo)
    return clone


def _small(like: Tensor) -> nn.Parameter:
    values = torch.linspace(-1.0, 1.0, 8, device=like.device)
    return nn.Parameter(values.reshape(2, 4).to(like.dtype))


def _try_steps(trial: torch.optim.Optimizer) -> Iterator[list[Tensor]]:
    """Step twice; after each, the gradients as they were before."""
    step = beneath_hooks(trial)
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
    for name, value in attributes(optimizer).items():
        inside = value.values() if isinstance(value, Mapping) else value
        held = inside if isinstance(value, (Mapping, list, tuple)) else (value,)
        if any(isinstance(thing, torch.optim.Optimizer) for thing in held):
            return name
    return None


def attributes(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """What the instance holds that is not different in each view."""
    return {k: v for k, v in vars(optimizer).items() if k not in _OF_A_VIEW}


def kept(optimizer: torch.optim.Optimizer) -> dict[tuple[str, int], Any]:
    """What an optimizer keeps beside the state of its parameters, as it is now.

    By its name for people, with the number of the group. Objects with insides of their own are
    only told apart from others: what changes inside them is not seen.
    """
    found = {
        (f"group[{name!r}]", number): _as_now(value)
        for number, group in enumerate(optimizer.param_groups)
        for name, value in group.items()
        if name != "params"
    }
    for name, value in attributes(optimizer).items():
        found[f"self.{name}", 0] = _as_now(value)
    for key, value in _common_state(optimizer).items():
        found[f"self.state[{key!r}]", 0] = _as_now(value)
    return found


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


def changed(before: dict[tuple[str, int], Any], after: dict[tuple[str, int], Any]) -> str | None:
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


def clone_of(
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
