"""Training loops as people write them, with their habits, against their DDP originals."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import sapwood
from sapwood.testing import ranks
from sapwood.testing.ranks import rank, world
from tests.sync import models

VOCABULARY, BLOCK, WIDTH = 24, 8, 16


def ddp(model: nn.Module, **options: Any) -> nn.Module:
    return DistributedDataParallel(model, **options) if world() > 1 else model


def states(model: nn.Module) -> list[Tensor]:
    return [t.detach().clone() for t in model.state_dict().values()]


# -- nanoGPT's train.py ------------------------------------------------------------------------


class Gpt(nn.Module):
    """Tied embedding, a mask as a buffer, and a forward that returns logits and loss."""

    def __init__(self) -> None:
        super().__init__()
        self.wte = nn.Embedding(VOCABULARY, WIDTH)
        self.wpe = nn.Embedding(BLOCK, WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH))
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.lm_head.weight = self.wte.weight
        self.register_buffer("bias", torch.tril(torch.ones(BLOCK, BLOCK)))

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Any:
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1]))
        q, k, v = self.qkv(self.norm(x)).split(WIDTH, dim=2)
        mask = self.bias[: tokens.shape[1], : tokens.shape[1]] == 0
        weights = (q @ k.transpose(1, 2) / math.sqrt(WIDTH)).masked_fill(mask, -math.inf)
        x = x + weights.softmax(-1) @ v
        x = x + self.mlp(x)
        if targets is None:
            return self.lm_head(x[:, [-1]]), None
        logits = self.lm_head(x)
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Text:
    """``get_batch``, with a state of its own, as nanoGPT's random offsets have."""

    def __init__(self) -> None:
        self._chance = torch.Generator().manual_seed(1337 + rank())

    def get_batch(self, split: str = "train") -> tuple[Tensor, Tensor]:
        tokens = torch.randint(0, VOCABULARY, (4, BLOCK + 1), generator=self._chance)
        return tokens[:, :-1], tokens[:, 1:]


def decay_groups(model: nn.Module) -> list[dict[str, Any]]:
    trained = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in trained if p.dim() >= 2], "weight_decay": 0.1},
        {"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0},
    ]


def get_lr(iteration: int) -> float:
    if iteration < 2:
        return 1e-2 * (iteration + 1) / 3
    return 1e-3 + 0.5 * (1.0 + math.cos(math.pi * iteration / 6)) * 9e-3


@torch.no_grad()
def estimate_loss(model: nn.Module) -> float:
    model.eval()
    chance = torch.Generator().manual_seed(7)
    tokens = torch.randint(0, VOCABULARY, (4, BLOCK + 1), generator=chance)
    _, loss = model(tokens[:, :-1], tokens[:, 1:])
    model.train()
    return loss.item()


@dataclass(frozen=True)
class Config:
    grad_clip: float
    scaled: bool
    parts: int = 3
    max_iters: int = 6
    eval_interval: int = 2


def nanogpt_original(config: Config) -> tuple[list[float], list[Tensor]]:
    model = models.seeded(Gpt)
    optimizer = torch.optim.AdamW(decay_groups(model), lr=1e-2, betas=(0.9, 0.95))
    scaler = torch.amp.GradScaler("cpu", enabled=config.scaled, init_scale=256.0)
    wrapped = ddp(model)
    text, seen = Text(), []
    x, y = text.get_batch()
    for iteration in range(config.max_iters):
        for group in optimizer.param_groups:
            group["lr"] = get_lr(iteration)
        if iteration % config.eval_interval == 0 and rank() == 0:
            seen.append(estimate_loss(model))
        for part in range(config.parts):
            wrapped.require_backward_grad_sync = part == config.parts - 1
            _, loss = wrapped(x, y)
            loss = loss / config.parts
            x, y = text.get_batch()
            scaler.scale(loss).backward()
        if config.grad_clip != 0.0:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), config.grad_clip)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
    return seen, states(model)


def nanogpt_ours(config: Config) -> tuple[list[float], list[Tensor]]:
    model = models.seeded(Gpt)
    optimizer = torch.optim.AdamW(decay_groups(model), lr=1e-2, betas=(0.9, 0.95))
    scaler = torch.amp.GradScaler("cpu", enabled=config.scaled, init_scale=256.0)
    run = sapwood.Run(model, optimizer, scaler=scaler, clip_grad_norm=config.grad_clip)
    text, seen = Text(), []
    x, y = text.get_batch()
    for iteration in range(config.max_iters):
        for group in optimizer.param_groups:
            group["lr"] = get_lr(iteration)
        if iteration % config.eval_interval == 0 and run.rank == 0:
            seen.append(estimate_loss(model))
        for part in range(config.parts):
            with run.accumulate(active=part < config.parts - 1):
                _, loss = run.model(x, y)
                loss = loss / config.parts
                x, y = text.get_batch()
                scaler.scale(loss).backward()
        run.step()
    run.close()
    return seen, states(model)


def nanogpt(config: Config) -> tuple[bool, bool]:
    expected, ours = nanogpt_original(config), nanogpt_ours(config)
    return expected[0] == ours[0], models.same(expected[1], ours[1])


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize(
    "config",
    [Config(grad_clip=1.0, scaled=True), Config(grad_clip=0.0, scaled=False)],
    ids=["scaled and clipped", "grad_clip=0.0"],
)
def test_nanogpts_loop(config: Config, count: int) -> None:
    for facts in ranks.spawn(nanogpt, count, config, init=count > 1, timeout=100):
        assert facts == (True, True)


# -- a loop in the manner of accelerate --------------------------------------------------------


class Classifier(nn.Module):
    """Computes its own loss and returns a dictionary, like a model of Hugging Face."""

    def __init__(self) -> None:
        super().__init__()
        self.body = models.mlp(layers=2)
        self.pooler = nn.Linear(4, 4)  # never used, as in half of those models

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.body(x)
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


def loader(epoch: int) -> DataLoader[Any]:
    chance = torch.Generator().manual_seed(3)
    rows = 44 * world()
    data = TensorDataset(
        torch.randn(rows, 16, generator=chance), torch.randint(0, 4, (rows,), generator=chance)
    )
    sampler: DistributedSampler[Any] = DistributedSampler(
        data, num_replicas=world(), rank=rank(), seed=5
    )
    sampler.set_epoch(epoch)
    return DataLoader(data, batch_size=8, sampler=sampler)


def parts(epoch: int, every: int) -> Iterator[tuple[Tensor, Tensor, bool]]:
    """Batches, and whether the optimizer steps after each: at ``every``, and the epoch's last."""
    batches = list(loader(epoch))
    for number, (x, y) in enumerate(batches, start=1):
        yield x, y, number % every == 0 or number == len(batches)


def warm_up(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LambdaLR:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: min(1.0, (n + 1) / 4))


def gathered(model: nn.Module) -> float:
    """What ``accelerator.gather`` is used for: every rank's part of a metric."""
    model.eval()
    with torch.no_grad():
        x, y = models.batch(99, rank())
        value = model(x, y)["loss"]
    if world() > 1:
        dist.all_reduce(value)
    model.train()
    return value.item()


def accelerate_original() -> tuple[list[float], list[Tensor]]:
    model = models.seeded(Classifier)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = warm_up(optimizer)
    wrapped = ddp(model, find_unused_parameters=True)
    seen = []
    for epoch in range(2):
        for x, y, last in parts(epoch, 4):
            alone = world() == 1 or last
            with nullcontext() if alone else wrapped.no_sync():
                (wrapped(x, labels=y)["loss"] / 4).backward()
            if last:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        seen.append(gathered(model))
    return seen, states(model)


def accelerate_ours() -> tuple[list[float], list[Tensor]]:
    model = models.seeded(Classifier)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = warm_up(optimizer)
    seen = []
    with sapwood.Run(model, optimizer, schedulers=[scheduler], clip_grad_norm=0.5) as run:
        for epoch in range(2):
            for x, y, last in parts(epoch, 4):
                with run.accumulate(active=not last):
                    (run.model(x, labels=y)["loss"] / 4).backward()
                if last:
                    run.step()
            seen.append(gathered(model))
    return seen, states(model)


def accelerate() -> tuple[bool, bool]:
    expected, ours = accelerate_original(), accelerate_ours()
    return expected[0] == ours[0], models.same(expected[1], ours[1])


@pytest.mark.parametrize("count", [1, 2])
def test_a_loop_in_the_manner_of_accelerate(count: int) -> None:
    for facts in ranks.spawn(accelerate, count, init=count > 1, timeout=100):
        assert facts == (True, True)


# -- fine-tuning with frozen BatchNorm ---------------------------------------------------------


class Backbone(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(1, 4, 3, padding=1)
        self.norm = nn.BatchNorm1d(4)
        self.body = nn.Conv1d(4, 4, 3, padding=1)
        self.norm2 = nn.BatchNorm1d(4)
        self.head = nn.Linear(64, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.conv(x[:, None])))
        return self.head(F.relu(self.norm2(self.body(x))).flatten(1))

    def train(self, mode: bool = True) -> Backbone:
        """Statistics of the pre-training are kept, as detection models do."""
        super().train(mode)
        for module in self.modules():
            if isinstance(module, nn.BatchNorm1d):
                module.eval()
                module.requires_grad_(False)
        return self


def pretrained() -> Backbone:
    def build() -> nn.Module:
        model = Backbone()
        for norm in (model.norm, model.norm2):
            norm.running_mean.normal_()
            norm.running_var.uniform_(0.5, 2.0)
        return model

    model = models.seeded(build)
    assert isinstance(model, Backbone)
    model.conv.requires_grad_(False)
    model.body.requires_grad_(False)
    return model.train()


def discriminative(model: Backbone) -> torch.optim.Optimizer:
    """A learning rate for the head, a lower one for what is unfrozen later."""
    backbone = [*model.conv.parameters(), *model.body.parameters()]
    groups = [{"params": backbone, "lr": 0.01}, {"params": list(model.head.parameters())}]
    return torch.optim.SGD(groups, lr=0.1, momentum=0.9)


def fine_tune_original() -> list[Tensor]:
    model = pretrained()
    optimizer = discriminative(model)
    wrapped = ddp(model)
    for step in range(6):
        if step == 3:
            model.body.requires_grad_(True)
            wrapped = ddp(model)
        x, y = models.batch(step, rank())
        optimizer.zero_grad()
        models.loss_of(wrapped(x), y).backward()
        optimizer.step()
    return states(model)


def fine_tune_ours(settings: dict[str, Any]) -> list[Tensor]:
    model = pretrained()
    with sapwood.Run(model, discriminative(model), **settings) as run:
        for step in range(6):
            if step == 3:
                model.body.requires_grad_(True)
            models.train_run_step(run, step)
    return states(model)


def fine_tune(settings: dict[str, Any]) -> bool:
    return models.same(fine_tune_original(), fine_tune_ours(settings))


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("update", ["layerwise", "deferred"])
def test_fine_tuning_with_frozen_batch_norm(update: str, count: int) -> None:
    assert all(ranks.spawn(fine_tune, count, {"update": update}, init=count > 1, timeout=100))


# -- rank 0 looks by itself --------------------------------------------------------------------


def evaluated(how: str) -> list[Tensor]:
    model = models.seeded(models.Norms)
    with sapwood.Run(model, torch.optim.SGD(model.parameters(), lr=0.1), timeout=30.0) as run:
        for step in range(4):
            x, y = models.batch(step, rank())
            loss = models.loss_of(run.model(x), y)
            loss.backward()
            if how == "before the step" and rank() == 0:
                models.loss_of(model.eval()(x), y)
                model.train()
            run.step()
            if how == "between steps" and rank() == 0:
                with torch.no_grad():
                    for part in range(3):
                        model.eval()(models.batch(part, 5)[0])
                model.train()
        return [*states(model), *models.weights(model)]


def look_alone(how: str) -> bool:
    return models.same(evaluated("not at all"), evaluated(how))


@pytest.mark.parametrize("how", ["between steps", "before the step"])
def test_rank_0_may_evaluate_by_itself(how: str) -> None:
    assert all(ranks.spawn(look_alone, 2, how, timeout=100))


# -- going on after a restart ------------------------------------------------------------------


def interrupted(until: int) -> tuple[list[int], list[Tensor]]:
    """The loop of a script that is started again: the same lines the first time and later."""
    model = models.seeded(models.Norms)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    seen = []
    with sapwood.Run(model, optimizer) as run:
        with sapwood.Checkpointer(run, "ckpts", every=2, engine="sync") as ckpt:
            restored = ckpt.restore_latest()
            begin = restored.step if restored else 0
            assert begin == run.step_count
            for step in range(begin, until):
                models.train_run_step(run, step)
                seen.append(step)
        return seen, states(model)


def test_the_step_count_after_a_restore() -> None:
    plain = models.seeded(models.Norms)
    models.train_plain(plain, torch.optim.Adam(plain.parameters(), lr=1e-2), 7)
    assert interrupted(5)[0] == [0, 1, 2, 3, 4]
    seen, found = interrupted(7)
    assert seen == [4, 5, 6]  # step 5 was not saved: it is done again
    assert models.same(found, states(plain))
