"""Copies of a model in training: they are models of their own."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

import sapwood
from tests.sync import models


def saved(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    assert b"sapwood" not in file.getvalue()  # it can be read where there is no Sapwood
    file.seek(0)
    loaded: nn.Module = torch.load(file, weights_only=False)
    return loaded


def averaged(model: nn.Module) -> nn.Module:
    inner: nn.Module = AveragedModel(model).module
    return inner


@pytest.mark.parametrize("taken", [saved, copy.deepcopy, averaged])
@pytest.mark.parametrize("within_step", [False, True])
def test_a_copy_trains_alone(taken, within_step: bool) -> None:
    plain, ours = models.mlp(), models.mlp()
    expected = models.train_plain(plain, torch.optim.Adam(plain.parameters(), lr=0.05), 6)
    optimizer = torch.optim.Adam(ours.parameters(), lr=0.05)
    got = []
    with sapwood.Run(ours, optimizer, update="auto") as run:
        for step in range(6):
            x, y = models.batch(step)
            loss = models.loss_of(run.model(x), y)
            if step == 3 and within_step:
                other = taken(ours)
                train_alone(other)
            loss.backward()
            run.step()
            got.append(loss.item())
            if step == 3 and not within_step:
                other = taken(ours)
                assert models.same(models.weights(other), models.weights(ours))
                before = models.weights(ours)
                train_alone(other)
                assert not models.same(models.weights(other), models.weights(ours))
                assert models.same(models.weights(ours), before)
    assert got == expected


def train_alone(model: nn.Module) -> None:
    model.train().requires_grad_(True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        x, y = models.batch(step)
        optimizer.zero_grad()
        models.loss_of(model(x), y).backward()
        optimizer.step()
