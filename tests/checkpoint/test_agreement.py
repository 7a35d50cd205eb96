"""Ranks that are about to save different tensors are told so, and by name."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import sapwood
from sapwood.testing import ranks
from sapwood.testing.ranks import rank
from tests.checkpoint.training import Training

ENV = {"SAPWOOD_CHECKPOINT_LINGER": "0.2"}


def checkpointer(training: Training, folder: Path, **options: Any) -> sapwood.Checkpointer:
    return sapwood.Checkpointer(
        training.run, folder / "ckpts", mode="sharded", keep=None, **options
    )


def save_what_differs(folder: Path, engine: str, sizes: tuple[int, int]) -> str:
    training = Training(folder, timeout=20)
    if sizes[rank()]:
        training.model.extra = nn.Linear(sizes[rank()], 1, bias=False).requires_grad_(False)
    c = checkpointer(training, folder, every=2, engine=engine)
    try:
        training.steps(4)
    except sapwood.SapwoodError as error:
        c.close()
        training.run.close(error)
        return str(error)
    return "nothing"


@pytest.mark.parametrize(
    ("engine", "sizes", "difference"),
    [
        ("node", (0, 3), r"model extra\.weight: only on rank 1$"),
        (
            "sync",
            (2, 3),
            r"model extra\.weight: F32 \[1, \d\] on rank \d, F32 \[1, \d\] on rank \d",
        ),
    ],
)
def test_another_model_on_one_rank(
    tmp_path: Path, engine: str, sizes: tuple[int, int], difference: str
) -> None:
    texts = ranks.spawn(save_what_differs, 2, tmp_path, engine, sizes, env=ENV)
    for text in texts:  # whoever came second found it; the other hears of it
        assert "step 2 is not saved: rank" in text
        assert "has other tensors than rank" in text
    assert any(re.search(difference, text) for text in texts)
    assert [p.name for p in (tmp_path / "ckpts").glob("00*") if not p.suffix] == []


def move_one_tensor(folder: Path) -> list[int]:
    training = Training(folder)
    with checkpointer(training, folder, every=1, engine="sync") as c:
        training.steps(2)
        if rank() == 0:  # so that this rank alone plans anew
            weight = training.model.head.weight
            weight.data = weight.data.clone()
        training.steps(4)
        c.wait()
        saved = [s.id.step for s in c.stats.saves if set(s.durable) == {"memory", "external"}]
    training.close()
    return saved


def test_one_rank_may_plan_anew(tmp_path: Path) -> None:
    assert ranks.spawn(move_one_tensor, 2, tmp_path) == [[1, 2, 3, 4]] * 2
    assert len(list((tmp_path / "ckpts").glob("00*"))) == 4
