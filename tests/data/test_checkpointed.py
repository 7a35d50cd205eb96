"""A reader in a run's checkpoints: no sample twice and none left out, on other numbers of ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import sapwood
from sapwood.data import LmdbReader
from sapwood.testing import ranks
from tests.data.databases import numbered, plain

RECORDS, BATCH, STOPPED, STEPS = 100, 12, 11, 20


def train(folder: Path, steps: int, mode: str) -> list[list[int]]:
    """The records this rank has trained on, step by step."""
    model = torch.nn.Linear(64, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    seen: list[list[int]] = []
    with sapwood.Run(model, optimizer, folder=folder / "runs") as run:
        reader = LmdbReader(folder / "a.mdb", BATCH, epochs=None, seed=3)
        with sapwood.Checkpointer(
            run, folder / "ckpts", every=4, mode=mode, engine="sync", shared={"data": reader}
        ) as ckpt:
            ckpt.restore_latest()
            batches = iter(reader)
            while run.step_count < steps:
                batch = next(batches)
                run.model(batch.tensor.float()).mean().backward()
                run.step()
                seen.append(batch.index.tolist())
            ckpt.save()
            ckpt.wait()
        reader.close()
    return seen


@pytest.mark.parametrize(("first", "second", "mode"), [(2, 3, "lazy"), (3, 1, "backward")])
def test_a_run_goes_on_in_mid_epoch(tmp_path: Path, first: int, second: int, mode: str) -> None:
    plain(tmp_path / "a.mdb", numbered(RECORDS, lambda n: 64))
    parts = [
        *zip(*ranks.spawn(train, first, tmp_path, STOPPED, mode), strict=True),
        *zip(*ranks.spawn(train, second, tmp_path, STEPS, mode), strict=True),
    ]
    found = [[record for one in part for record in one] for part in parts]
    alone = LmdbReader(tmp_path / "a.mdb", BATCH, epochs=None, seed=3, rank=0, world=1)
    expected = [batch.index.tolist() for batch, _ in zip(alone, range(STEPS), strict=False)]
    alone.close()
    assert found == expected
