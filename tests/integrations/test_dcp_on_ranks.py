"""DCP on several ranks: who writes what, another number of ranks, and a rank that dies."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.planner import LoadPlan
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from sapwood.errors import MismatchError
from sapwood.integrations.dcp import SapwoodReader, SapwoodStager, SapwoodWriter
from sapwood.testing import faults, ranks


def trained(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The same on every rank, as in data-parallel training."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(16, 8), nn.Linear(8, 4))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(3, 16)).square().sum().backward()
    optimizer.step()
    return model, optimizer


def both(seed: int) -> dict[str, Any]:
    model, optimizer = trained(seed)
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


def flat(value: Any) -> list[Tensor]:
    if isinstance(value, dict):
        return [t for v in value.values() for t in flat(v)]
    return [value] if isinstance(value, Tensor) else []


def save_and_load(place: str) -> bool:
    dcp.save(both(1), storage_writer=SapwoodWriter(place))
    found = both(2)
    dcp.load(found, storage_reader=SapwoodReader(place))
    return all(map(torch.equal, flat(found), flat(both(1))))


def test_two_ranks_share_the_writing_and_both_get_all_back():
    assert ranks.spawn(save_and_load, 2, "ckpts", init=True) == [True, True]
    (home,) = Path("ckpts").glob("dcp-*")
    sizes = [(home / f"rank-{n}.bin").stat().st_size for n in range(2)]
    assert all(sizes)


WHOLE = torch.arange(7 * 6, dtype=torch.float32).reshape(7, 6)


def save_sharded(place: str) -> None:
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    state = {
        "rows": distribute_tensor(WHOLE, mesh, [Shard(0)]),
        "columns": distribute_tensor(WHOLE, mesh, [Shard(1)]),
        "copies": distribute_tensor(WHOLE, mesh, [Replicate()]),
    }
    dcp.save(state, storage_writer=SapwoodWriter(place))


def load_sharded(place: str) -> list[Tensor]:
    """Other placements than it was saved with."""
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    state = {
        name: distribute_tensor(torch.zeros(7, 6), mesh, [placement])
        for name, placement in (("rows", Shard(1)), ("columns", Replicate()), ("copies", Shard(0)))
    }
    dcp.load(state, storage_reader=SapwoodReader(place))
    return [tensor.full_tensor() for tensor in state.values()]


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2), (2, 3)])
def test_sharded_tensors_load_on_other_ranks_in_other_shards(before, after):
    ranks.spawn(save_sharded, before, "ckpts", init=True)
    for tensors in ranks.spawn(load_sharded, after, "ckpts", init=True):
        assert all(torch.equal(tensor, WHOLE) for tensor in tensors)


def save_again(place: str) -> None:
    dcp.save(both(2), storage_writer=SapwoodWriter(place))


def load_both(place: str) -> list[Tensor]:
    found = both(3)
    dcp.load(found, storage_reader=SapwoodReader(place))
    return flat(found)


@pytest.mark.parametrize(("who", "at"), [(1, 2), (1, 3), (0, 6), (0, 12)])
def test_a_rank_killed_in_a_save_leaves_the_save_before(who, at):
    ranks.spawn(save_and_load, 2, "ckpts", init=True)
    armed = faults.env(f"files:kill@{at}[rank={who}]")
    outcomes = ranks.spawn(
        save_again, 2, "ckpts", init=True, env=armed, expect_errors=True, timeout=60
    )
    assert outcomes[who].signal is signal.SIGKILL
    for tensors in ranks.spawn(load_both, 2, "ckpts", init=True):
        assert all(map(torch.equal, tensors, flat(both(1))))


def load_damaged(place: str) -> bool:
    """Only rank 1's file is damaged; no rank may have begun to load."""
    found = both(3)
    with pytest.raises(CheckpointException, match="do not match their checksum"):
        dcp.load(found, storage_reader=SapwoodReader(place))
    return all(map(torch.equal, flat(found), flat(both(3))))


def test_damage_that_one_rank_meets_stops_all_before_they_begin():
    ranks.spawn(save_and_load, 2, "ckpts", init=True)
    (path,) = Path("ckpts").glob("dcp-*/rank-1.bin")
    content = bytearray(path.read_bytes())
    content[3] ^= 1
    path.write_bytes(content)
    assert ranks.spawn(load_damaged, 2, "ckpts", init=True) == [True, True]


def test_ranks_that_see_different_saves_do_not_load_a_mix():
    plans = [LoadPlan([], storage_data=f"dcp-0000000{n}") for n in (1, 2)]
    with pytest.raises(MismatchError, match="different saves"):
        SapwoodReader("ckpts").prepare_global_plan(plans)


def save_async(place: str) -> bool:
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    rows = distribute_tensor(WHOLE, mesh, [Shard(0)])
    assert isinstance(rows, DTensor)
    stager = SapwoodStager()
    futures = []
    for step in range(4):
        state = {"rows": rows, "step": step, "mine": torch.full((3,), float(step))}
        writer = SapwoodWriter(place)
        future = dcp.async_save(state, storage_writer=writer, async_stager=stager)
        with torch.no_grad():
            rows.to_local().add_(1)  # the next step goes on at once
        futures.append(future)
        future.result(timeout=60)
    stager.close()
    found = {
        "rows": distribute_tensor(torch.zeros(7, 6), mesh, [Shard(0)]),
        "step": -1,
        "mine": torch.zeros(3),
    }
    dcp.load(found, storage_reader=SapwoodReader(place))
    rows_right = torch.equal(found["rows"].full_tensor(), WHOLE + 3)
    return rows_right and found["step"] == 3 and found["mine"].tolist() == [3.0] * 3


def test_async_saves_keep_what_was_staged():
    assert ranks.spawn(save_async, 2, "ckpts", init=True) == [True, True]
