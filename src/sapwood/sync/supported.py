"""What a Run can train: everything else is refused by name, with the remedy, before training."""

from __future__ import annotations

import inspect
import logging
import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from sapwood.errors import ConfigError, UsageError
from sapwood.state.tensors import clean_name, named_parameters, unwrap

if TYPE_CHECKING:
    from torch.optim.lr_scheduler import LRScheduler

__all__ = ["Claim", "check_kinds", "check_scaler", "check_schedulers"]

log = logging.getLogger(__name__)

_PLAIN = "pass the plain module: a Run averages gradients itself"
# By name, because importing FSDP or a third party's wrapper only to look for it costs seconds.
_WRAPPERS = {
    "torch.nn.parallel.distributed.DistributedDataParallel": (
        "wrapped in DistributedDataParallel",
        f"{_PLAIN} (the wrapper's .module; engine='ddp' makes a wrapper of its own)",
    ),
    "torch.distributed._composable.replicate.DDP": ("passed through replicate()", _PLAIN),
    "torch.distributed._composable.replicate_with_fsdp.ReplicateModule": (
        "passed through replicate()",
        _PLAIN,
    ),
    "torch.nn.parallel.data_parallel.DataParallel": (
        "wrapped in DataParallel",
        "pass its .module and start one process per device: torchrun, or `sapwood run`",
    ),
    "torch.distributed.fsdp.fully_sharded_data_parallel.FullyShardedDataParallel": (
        "wrapped in FullyShardedDataParallel",
        "pass the plain module: a Run needs every weight whole on every rank",
    ),
    "torch.distributed.fsdp.FSDPModule": (
        "sharded with fully_shard()",
        "leave fully_shard() away: a Run needs every weight whole on every rank",
    ),
    "deepspeed.runtime.engine.DeepSpeedEngine": ("wrapped in DeepSpeedEngine", _PLAIN),
    "torch.jit._script.RecursiveScriptModule": (
        "compiled with torch.jit.script()",
        "pass the plain module, or one from torch.compile()",
    ),
}
_OPTIMIZERS = {
    "torch.distributed.optim.zero_redundancy_optimizer.ZeroRedundancyOptimizer": (
        "every rank must hold the whole optimizer state; pass the optimizer it was made with"
    ),
    "torch.distributed.optim.post_localSGD_optimizer.PostLocalSGDOptimizer": (
        "it averages weights itself; pass the optimizer inside it"
    ),
    "horovod.torch.optimizer._DistributedOptimizer": (
        "it averages gradients itself; pass the optimizer it was made from"
    ),
    "accelerate.optimizer.AcceleratedOptimizer": (
        "it steps by rules of its own; pass the optimizer inside it, its .optimizer, and the model "
        "before accelerator.prepare()"
    ),
}


def check_kinds(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Refuse models and optimizers that somebody else already synchronises or shards.

    Raises:
        ConfigError: with the name of the kind, where it is, and what to pass instead.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigError(
            f"the optimizer is a {type(optimizer).__name__}, expected a torch.optim.Optimizer"
        )
    for name, module in model.named_modules():
        for found in _kinds(module) & _WRAPPERS.keys():
            state, remedy = _WRAPPERS[found]
            whose = f"its part {clean_name(name)}" if clean_name(name) else "the model"
            raise ConfigError(f"{whose} is {state}; {remedy}")
    for found in _kinds(optimizer) & _OPTIMIZERS.keys():
        kind = found.rpartition(".")[2].lstrip("_")
        raise ConfigError(f"the optimizer is a {kind}: {_OPTIMIZERS[found]}")
    _check_tensors(model)


def _check_tensors(model: nn.Module) -> None:
    """Refuse parameters and buffers that have no plain memory of their own on this rank."""
    inner = unwrap(model)
    tensors: Iterable[tuple[str, Tensor]] = (*inner.named_parameters(), *inner.named_buffers())
    for name, tensor in tensors:
        if "torch.distributed.tensor.DTensor" in _kinds(tensor):
            raise ConfigError(
                f"{clean_name(name)} is a DTensor, spread over the ranks of its mesh; a Run needs "
                "plain tensors, whole on every rank: leave fully_shard(), parallelize_module() or "
                "distribute_tensor() away"
            )
        if torch.nn.parameter.is_lazy(tensor):
            raise ConfigError(
                f"{clean_name(name)} has no shape yet (a lazy module); call the model once, with a "
                "batch, before making the optimizer and the Run"
            )


def _kinds(thing: object) -> set[str]:
    return {f"{kind.__module__}.{kind.__qualname__}" for kind in type(thing).__mro__}


def check_scaler(scaler: Any) -> None:
    """Refuse what cannot scale a loss.

    Raises:
        ConfigError: it is no gradient scaler.
    """
    if scaler is not None and not isinstance(scaler, torch.amp.GradScaler):
        raise ConfigError(
            f"scaler is a {type(scaler).__name__}, expected a torch.amp.GradScaler, or None"
        )


def check_schedulers(
    schedulers: Iterable[LRScheduler], optimizer: torch.optim.Optimizer
) -> list[LRScheduler]:
    """The schedulers as a list, each of which a Run can step by itself.

    Raises:
        ConfigError: one needs to be told something at each step, or is of another optimizer.
    """
    if hasattr(schedulers, "step") or not hasattr(schedulers, "__iter__"):
        kind = type(schedulers).__name__
        raise ConfigError(f"schedulers is a {kind}, expected a list: schedulers=[scheduler]")
    found = list(schedulers)
    for scheduler in found:
        kind = type(scheduler).__name__
        needed = _needed(scheduler)
        if needed:
            raise ConfigError(
                f"{kind}.step() needs {', '.join(needed)}, which a Run does not have; leave it out "
                f"of schedulers= and call scheduler.step(...) yourself after run.step(), with the "
                "same value on every rank (Checkpointer(shared={'scheduler': scheduler}) saves it)"
            )
        if getattr(scheduler, "optimizer", optimizer) is not optimizer:
            raise ConfigError(
                f"{kind} was made for another optimizer than this Run's; make it from the "
                "optimizer given to the Run, or step it yourself"
            )
    return found


def _needed(scheduler: Any) -> list[str]:
    """The arguments without which ``scheduler.step`` cannot be called."""
    step = getattr(scheduler, "step", None)
    if not callable(step):
        kind = type(scheduler).__name__
        raise ConfigError(f"a {kind} in schedulers= has no step(), expected a scheduler of torch's")
    try:
        parameters = inspect.signature(step).parameters.values()
    except (TypeError, ValueError):  # not a function of Python's; found out when it is called
        return []
    optional = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [p.name for p in parameters if p.default is p.empty and p.kind not in optional]


class Claim:
    """What one open Run trains; held by that Run, and forgotten with it."""

    _open: ClassVar[weakref.WeakSet[Claim]] = weakref.WeakSet()

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Take a model and an optimizer.

        Raises:
            UsageError: another open Run has the model, the optimizer or some of its parameters.
        """
        self.run = "that is being made"
        self._model = unwrap(model)
        self._optimizer = optimizer
        for other in list(Claim._open):
            self._refuse(other)
        Claim._open.add(self)

    def release(self) -> None:
        """The Run is closed."""
        Claim._open.discard(self)

    def _refuse(self, other: Claim) -> None:
        what = None
        if self._model is other._model:
            what = "this model already"
        elif self._optimizer is other._optimizer:
            what = "with this optimizer already"
        else:
            theirs = _held(other._optimizer)
            names = {id(p): name for name, p in named_parameters(self._model).items()}
            both = [names.get(key, "a parameter") for key in _held(self._optimizer) & theirs]
            if both:
                what = f"{len(both)} of these parameters already ({min(both)})"
        if what is not None:
            raise UsageError(
                f"run {other.run} trains {what}; two Runs would both update it. Close the other "
                "one first: run.close(), or make it in a `with` block"
            )


def _held(optimizer: torch.optim.Optimizer) -> set[int]:
    return {id(p) for group in optimizer.param_groups for p in group["params"]}
