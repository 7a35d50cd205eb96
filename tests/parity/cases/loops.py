"""Loops people have: accumulation in several styles, habits, and calls at odd places."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from sapwood.testing.ranks import rank
from tests.parity.cases.shapes import Experts, Images
from tests.parity.harness import Case, Trainer, batch, loss_of, pause, sgd


def mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4)
    )


def fused(model: nn.Module) -> torch.optim.Optimizer:
    return sgd(model, fused=True)


# -- accumulation ------------------------------------------------------------------------------

PARTS = 3


def parts(step: int) -> Iterator[tuple[bool, Tensor, Tensor]]:
    for part in range(PARTS):
        yield part == PARTS - 1, *batch(PARTS * step + part)


def around_both(trainer: Trainer, step: int) -> Tensor:
    for last, x, y in parts(step):
        with trainer.accumulate(not last):
            loss = loss_of(trainer.model(x), y) / PARTS
            loss.backward()
    trainer.end()
    return loss


def around_backward(trainer: Trainer, step: int) -> Tensor:
    if not trainer.ours:
        return around_both(trainer, step)  # DDP wants its context around forward too
    for last, x, y in parts(step):
        loss = loss_of(trainer.model(x), y) / PARTS
        with nullcontext() if last else trainer.run.accumulate():
            loss.backward()
    trainer.end()
    return loss


def by_flag(trainer: Trainer, step: int) -> Tensor:
    if not trainer.ours:
        return around_both(trainer, step)
    for last, x, y in parts(step):
        with trainer.run.accumulate(active=not last):
            loss = loss_of(trainer.model(x), y) / PARTS
            loss.backward()
    trainer.end()
    return loss


def in_one_backward(trainer: Trainer, step: int) -> Tensor:
    """Two forwards, one backward."""
    x, y = batch(step)
    loss = loss_of(trainer.model(x), y) + loss_of(trainer.model(x * 0.5), y)
    loss.backward()
    trainer.end()
    return loss


def interleaved(trainer: Trainer, step: int) -> Tensor:
    """Both forwards come before both backwards."""
    x, y = batch(step)
    first = loss_of(trainer.model(x), y)
    second = loss_of(trainer.model(x * 0.5), y)
    with trainer.accumulate():
        first.backward()
    second.backward()
    trainer.end()
    return first + second


def retained(trainer: Trainer, step: int) -> Tensor:
    """One graph, two backwards."""
    x, y = batch(step)
    output = trainer.model(x)
    first, second = loss_of(output, y), output.square().mean()
    with trainer.accumulate():
        first.backward(retain_graph=True)
    second.backward()
    trainer.end()
    return first + second


# -- habits --------------------------------------------------------------------------------------


def zeroes(where: str, **options: Any) -> Callable[[Trainer, int], Tensor]:
    def step(trainer: Trainer, number: int) -> Tensor:
        owner: Any = trainer.inner if "model" in where else trainer.optimizer
        x, y = batch(number)
        if "first" in where:
            owner.zero_grad(**options)
        output = trainer.model(x)
        if "before backward" in where:
            owner.zero_grad(**options)
        loss = loss_of(output, y)
        loss.backward()
        trainer.end()
        if "last" in where:
            owner.zero_grad(**options)
        return loss

    return step


def prefetched(trainer: Trainer, step: int) -> Tensor:
    """nanoGPT's loop: the next batch is fetched between forward and backward."""
    x, y = trainer.kept.pop("next", None) or batch(step)
    loss = loss_of(trainer.model(x), y)
    trainer.kept["next"] = batch(step + 1)
    loss.backward()
    trainer.end()
    return loss


def forward_before(trainer: Trainer, step: int) -> Tensor:
    """A forward with a graph that nobody back-propagates, in front of the one that counts."""
    x, y = batch(step)
    trainer.kept["unused output"] = trainer.model(x * 2)
    return simple(trainer, x, y)


def forward_after(trainer: Trainer, step: int) -> Tensor:
    """The same between forward and backward, and after the step."""
    x, y = batch(step)
    loss = loss_of(trainer.model(x), y)
    trainer.model(x * 2)
    loss.backward()
    trainer.end()
    trainer.model(x * 3)
    return loss


def forward_between(trainer: Trainer, step: int) -> Tensor:
    """The same between backward and step."""
    x, y = batch(step)
    loss = loss_of(trainer.model(x), y)
    loss.backward()
    with torch.no_grad():
        trainer.model(x * 2)
    trainer.end()
    return loss


def simple(trainer: Trainer, x: Tensor, y: Tensor) -> Tensor:
    loss = loss_of(trainer.model(x), y)
    loss.backward()
    trainer.end()
    return loss


def gradient_of_input(trainer: Trainer, step: int) -> Tensor:
    """A saliency map between steps, by autograd.grad on the run's own model."""
    x, y = batch(step)
    x.requires_grad_()
    loss = loss_of(trainer.inner(x) if not trainer.ours else trainer.model(x), y)
    (saliency,) = torch.autograd.grad(loss, x)
    trainer.extra.append(saliency)
    return simple(trainer, x.detach(), y)


def gradient_after_backward(trainer: Trainer, step: int) -> Tensor:
    """A saliency map from the graph that was back-propagated, before the step is ended."""
    x, y = batch(step)
    x.requires_grad_()
    output = trainer.model(x)
    loss = loss_of(output, y)
    loss.backward(retain_graph=True)
    trainer.settle()
    (saliency,) = torch.autograd.grad(output.sum(), x)
    trainer.extra.append(saliency)
    trainer.end()
    return loss


def gradient_after_step(trainer: Trainer, step: int) -> Tensor:
    """Another network's loss, computed earlier, is back-propagated after the step to its input."""
    x, y = batch(step)
    loss = loss_of(trainer.model(x), y)
    loss.backward()
    trainer.end()
    x = x.requires_grad_()
    (saliency,) = torch.autograd.grad(loss_of(trainer.inner(x), y), x)
    trainer.extra.append(saliency)
    return loss


def only_some(trainer: Trainer, step: int) -> Tensor:
    """backward(inputs=...): the gradient of the head only, in every other step."""
    x, y = batch(step)
    loss = loss_of(trainer.model(x), y)
    chosen = list(trainer.inner.parameters())[-2:] if step % 2 else None
    loss.backward(inputs=chosen)
    trainer.end()
    return loss


# -- hooks of the user ---------------------------------------------------------------------------


def tensor_hooks(trainer: Trainer) -> None:
    for parameter in trainer.inner.parameters():
        parameter.register_hook(lambda g: g.clamp(-0.01, 0.01))


def post_hooks(trainer: Trainer) -> None:
    def clamp(parameter: Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.clamp_(-0.01, 0.01)

    for parameter in trainer.inner.parameters():
        parameter.register_post_accumulate_grad_hook(clamp)


def ema(trainer: Trainer) -> None:
    average = AveragedModel(trainer.inner, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    trainer.kept["average"] = average
    trainer.extra += average.module.parameters()


def ema_step(trainer: Trainer, step: int) -> Tensor:
    loss = simple(trainer, *batch(step))
    trainer.kept["average"].update_parameters(trainer.inner)
    return loss


def ema_hook(trainer: Trainer) -> None:
    """An average by a hook of the optimizer."""
    ema(trainer)
    trainer.optimizer.register_step_post_hook(
        lambda *_: trainer.kept["average"].update_parameters(trainer.inner)
    )


def ema_by_hand(trainer: Trainer, step: int) -> Tensor:
    loss = simple(trainer, *batch(step))
    with torch.no_grad():
        for mine, theirs in zip(trainer.extra, trainer.inner.parameters(), strict=True):
            mine.lerp_(theirs, 0.1)
    return loss


def copies(trainer: Trainer) -> None:
    trainer.extra += [p.detach().clone() for p in trainer.inner.parameters()]


def constrain(trainer: Trainer, step: int) -> Tensor:
    """Weights are clipped after each step, as WGAN does, and given other memory at times."""
    loss = simple(trainer, *batch(step))
    for parameter in trainer.inner.parameters():
        parameter.data.clamp_(-0.1, 0.1)
    if step == 2:
        parameters = list(trainer.inner.parameters())
        flat = torch.nn.utils.parameters_to_vector(parameters).detach()
        torch.nn.utils.vector_to_parameters(flat * 0.9, parameters)
    return loss


# -- which parameters are trained ----------------------------------------------------------------


def freeze_first(trainer: Trainer) -> None:
    trainer.inner.get_submodule("0").requires_grad_(False)


def thaw(trainer: Trainer, step: int) -> Tensor:
    if step == 2:
        trainer.inner.get_submodule("0").requires_grad_(True)
    return simple(trainer, *batch(step))


def freeze_later(trainer: Trainer, step: int) -> Tensor:
    trainer.inner.get_submodule("2").requires_grad_(step % 3 != 1)
    return simple(trainer, *batch(step))


def head_only(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.get_submodule("4").parameters(), lr=0.1, momentum=0.9)


def add_group(trainer: Trainer, step: int) -> Tensor:
    """Layers are given to the optimizer one after the other."""
    place = {1: "2", 3: "0"}.get(step)
    if place is not None:
        part = trainer.inner.get_submodule(place).requires_grad_(True)
        trainer.optimizer.add_param_group({"params": list(part.parameters()), "lr": 0.05})
    return simple(trainer, *batch(step))


def freeze_all_but_head(trainer: Trainer) -> None:
    for place in ("0", "2"):
        trainer.inner.get_submodule(place).requires_grad_(False)


# -- several models, and parts of one --------------------------------------------------------------


class Two(nn.ModuleDict):
    def __init__(self) -> None:
        super().__init__({"left": mlp(), "right": mlp()})


def two_losses(trainer: Trainer, step: int) -> Tensor:
    x, y = batch(step)
    left, right = trainer.inner["left"], trainer.inner["right"]
    first, second = loss_of(left(x), y), loss_of(right(x), y)
    with trainer.accumulate():
        first.backward()
    second.backward()
    trainer.end()
    return first + second


class Slow(nn.Module):
    """An encoder and a head that the loop calls by themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.head = nn.Linear(16, 16), nn.Linear(16, 4)


def by_parts(trainer: Trainer, step: int) -> Tensor:
    """``run.model.encoder(x)``: nobody calls the model itself."""
    x, y = batch(step)
    model = trainer.inner
    hidden = pause(torch.tanh(model.encoder(x)), lambda: model.head.weight)
    loss = loss_of(model.head(hidden), y)
    loss.backward()
    trainer.end()
    return loss


# -- scaling and clipping --------------------------------------------------------------------------


def scaled(trainer: Trainer, step: int) -> Tensor:
    x, y = batch(step)
    bad = float("inf") if (step, rank()) == (1, 0) else 1.0
    loss = loss_of(trainer.model(x), y)
    assert trainer.scaler is not None
    trainer.scaler.scale(loss * bad).backward()
    trainer.end()
    return loss


def scaler() -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)


CASES: dict[str, Case] = {
    "accumulate around forward and backward": Case(build=mlp, step=around_both),
    "accumulate around backward alone": Case(build=mlp, step=around_backward, may_refuse=("ddp",)),
    "accumulate by a flag": Case(build=mlp, step=by_flag),
    "accumulate, unused parameters": Case(build=Experts, step=around_both, unused=True, steps=6),
    "accumulate by a flag, unused parameters": Case(
        build=Experts, step=by_flag, unused=True, steps=6
    ),
    "accumulate, eval mode": Case(build=mlp, step=around_both, evaluating=True),
    "accumulate, clipping": Case(build=mlp, step=around_both, clip=0.05),
    "accumulate, buffers": Case(build=Images, step=around_both, by_hand=False, skip=("ddp",)),
    "two forwards, one backward": Case(build=mlp, step=in_one_backward, by_hand=True),
    "two forwards, two backwards": Case(build=mlp, step=interleaved, by_hand=True),
    "one forward, two backwards": Case(build=mlp, step=retained, by_hand=True),
    "clipping": Case(build=mlp, clip=0.05),
    "clipping, unused parameters": Case(build=Experts, clip=0.05, unused=True),
    "scaler with an inf step": Case(build=mlp, step=scaled, scaler=scaler),
    "scaler with an inf step, clipping": Case(build=mlp, step=scaled, scaler=scaler, clip=0.05),
    "prefetched batch": Case(build=mlp, step=prefetched),
    "forward without backward before": Case(build=mlp, step=forward_before, by_hand=True),
    "forward without backward after": Case(build=mlp, step=forward_after, by_hand=True),
    "forward between backward and step": Case(build=mlp, step=forward_between, by_hand=True),
    "input gradients between steps": Case(build=mlp, step=gradient_of_input, by_hand=True),
    "input gradients after the step": Case(build=mlp, step=gradient_after_step),
    "input gradients after backward": Case(
        build=mlp,
        step=gradient_after_backward,
        optimizer=fused,
        may_refuse=("layerwise", "ddp"),
        may_raise="modified by an inplace operation",
    ),
    "backward(inputs=...)": Case(build=mlp, step=only_some, by_hand=True, steps=6),
    "hooks on parameters": Case(build=mlp, prepare=tensor_hooks),
    "hooks on parameters, made later": Case(build=mlp, attach=tensor_hooks),
    "post-accumulate hooks": Case(build=mlp, prepare=post_hooks),
    "post-accumulate hooks, made later": Case(
        build=mlp, attach=post_hooks, may_refuse=("layerwise", "deferred", "ddp")
    ),
    "average of weights": Case(build=Images, prepare=ema, step=ema_step),
    "average of weights by a hook": Case(build=mlp, prepare=ema_hook),
    "average of weights by hand": Case(build=mlp, prepare=copies, step=ema_by_hand),
    "weights changed after the step": Case(build=mlp, step=constrain, optimizer=fused),
    "thawed": Case(build=mlp, prepare=freeze_first, step=thaw, by_hand=True),
    "frozen at times": Case(build=mlp, step=freeze_later, by_hand=True, steps=6),
    "given to the optimizer later": Case(
        build=mlp,
        prepare=freeze_all_but_head,
        step=add_group,
        optimizer=head_only,
        by_hand=True,
        steps=5,
    ),
    "two models, two losses": Case(build=Two, step=two_losses, by_hand=True),
    "called by parts": Case(build=Slow, step=by_parts, by_hand=True, steps=6),
}
CASES |= {
    f"zero_grad({options}) {where}": Case(
        build=mlp, step=zeroes(where, **({"set_to_none": False} if options else {}))
    )
    for options in ("", "set_to_none=False")
    for where in ("first", "before backward", "last", "first, on the model")
}
CASES |= {
    f"{name}, eval mode": replace(CASES[name], evaluating=True)
    for name in ("thawed", "frozen at times", "given to the optimizer later", "called by parts")
}
