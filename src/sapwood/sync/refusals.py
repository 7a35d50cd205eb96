"""What the engines say when they refuse to go on: what was found, and what to do."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = [
    "ABORTED",
    "COMPILED_AUTOGRAD",
    "FORGOTTEN",
    "UNSCALED",
    "broken",
    "gradient_changed",
    "gradient_in_flight",
    "option_changed",
    "some",
    "sparse",
    "twice",
    "unfrozen",
    "weight_changed",
]

ABORTED = (
    "an exception ended its back-propagation; see the traceback there (if it says that a variable "
    "was modified in place, a weight is used through an alias that was updated: use "
    "update='deferred')"
)
COMPILED_AUTOGRAD = (
    "compiled autograd runs this back-propagation, in which gradients are not there one after the "
    "other; leave torch._dynamo.config.compiled_autograd off: a model compiled with torch.compile "
    "has its backward compiled all the same"
)
FORGOTTEN = (
    "backward() was called again before run.step() ended the step; call run.step() after each "
    "backward(), wrap all but the last backward of a step in `with run.accumulate():`, and freeze "
    "this model (requires_grad_(False)) around the backward of another model's loss. An exception "
    "may have skipped run.step(): a loop that catches one after backward() must still call it, or "
    "restart from a checkpoint"
)

UNSCALED = (
    "the Run has a gradient scaler, by whose scale gradients are divided, but no loss was "
    "multiplied by it: call scaler.scale(loss).backward(), or make the Run without scaler="
)


def broken(cause: str) -> str:
    """Somebody goes on after an error."""
    return (
        "an earlier error broke this run's step, and the ranks' states may differ; restart from a "
        f"checkpoint. It was: {cause}"
    )


def sparse(name: str) -> str:
    """An embedding with sparse=True."""
    return (
        f"the gradient of {name} is sparse, which cannot be fused into a bucket; make the "
        "embedding with sparse=False"
    )


def option_changed(option: str) -> str:
    """A hyperparameter was set too late."""
    return (
        f"the optimizer's {option} was changed between backward() and run.step(), but weights were "
        "updated during backward, with the old value; set it before backward(), or use "
        "update='deferred'"
    )


def weight_changed(name: str) -> str:
    """A weight was written too early."""
    return (
        f"{name} was changed between backward() and run.step(), but it is updated during backward, "
        "so one of the two would be lost; change weights after run.step(), or use "
        "update='deferred'"
    )


def unfrozen(names: Sequence[str]) -> str:
    """Parameters were unfrozen where the engine could not see it."""
    return (
        f"unfrozen, or given to the optimizer, since the last forward: {some(names)}; only parts "
        "of the model were called since then, so these gradients would be lost: call the whole "
        "model, run.model(...), in the first step after unfreezing"
    )


def twice(name: str) -> str:
    """A second gradient came for the same parameter."""
    return (
        f"{name} received its gradient twice in one backward(): re-entrant activation "
        "checkpointing over a shared parameter does this; use checkpoint(..., use_reentrant=False)"
    )


def gradient_changed(bucket: int, names: Sequence[str]) -> str:
    """A gradient was changed too late."""
    return (
        f"a gradient of bucket {bucket} ({some(names)}) was changed after backward(), "
        "but weights are updated during backward, with the unchanged one; clip with "
        "Run(clip_grad_norm=...), or use update='deferred' to change gradients between backward() "
        "and run.step()"
    )


def gradient_in_flight(names: Sequence[str]) -> str:
    """A gradient was changed while other ranks read it."""
    return (
        f"a gradient among {some(names)} was changed during back-propagation, after it had been "
        "handed over for averaging; change it in a hook of the parameter itself "
        "(p.register_post_accumulate_grad_hook), or between backward() and run.step() with "
        "update='deferred'"
    )


def some(names: Sequence[str]) -> str:
    """The first two names, and how many more there are."""
    return ", ".join(names[:2]) + (f" and {len(names) - 2} more" if len(names) > 2 else "")
