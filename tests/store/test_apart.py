"""Tensors that are merely equal stay apart, and what is tied stays what it was."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from sapwood.errors import DoesNotFit
from sapwood.store import Repository
from sapwood.store import open as open_repository


@pytest.fixture(params=["folder", "memory", "shared"])
def repo(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Repository]:
    place = "memory:" if request.param == "memory" else tmp_path / "models"
    with open_repository(place, shared=request.param == "shared") as repository:
        yield repository


def test_writing_to_a_loaded_tensor_leaves_equal_ones_alone(repo: Repository) -> None:
    model = nn.Sequential(*(nn.LayerNorm(2000) for _ in range(3)))
    repo.save(model, "norms@1")
    for merged in (False, True):
        found = repo.load("norms@1")
        found["0.weight"].fill_(7)
        assert found["1.weight"].eq(1).all(), f"merged={merged}"
        assert found["2.weight"].eq(1).all()
        assert found["2.bias"].eq(0).all()
        some = repo.load("norms@1", layers=["0", "2"])
        some["2.weight"].fill_(5)
        assert some["0.weight"].eq(1).all()
        repo.flush()


def test_equal_tensors_that_share_a_blob_of_the_parent_are_apart(repo: Repository) -> None:
    weight = torch.ones(3000)
    repo.save({"a": weight, "b": weight}, "tied@1")
    repo.save({"a": weight.clone(), "b": weight.clone()}, "tied@2", parent="tied@1")
    tied, apart = repo.load("tied@1"), repo.load("tied@2")
    tied["a"].fill_(7)
    assert tied["b"].eq(7).all()
    apart["a"].fill_(7)
    assert apart["b"].eq(1).all()


@pytest.mark.parametrize("dtype", [torch.bool, torch.bfloat16, torch.float8_e4m3fn])
def test_equal_tensors_of_any_dtype_come_back(repo: Repository, dtype: torch.dtype) -> None:
    repo.save({n: torch.ones(3, 5).to(dtype) for n in "abc"}, "same@1")
    repo.flush()
    found = repo.load("same@1")
    assert all(
        found[n].view(torch.uint8).equal(torch.ones(3, 5).to(dtype).view(torch.uint8))
        for n in "abc"
    )


@pytest.mark.parametrize("first", [True, False])
def test_a_parameter_and_a_plain_tensor_of_its_memory_stay_two_kinds(
    repo: Repository, first: bool
) -> None:
    weight = nn.Parameter(torch.randn(4))
    pairs = {"parameter": weight, "plain": weight.detach()}
    names = list(pairs) if first else list(pairs)[::-1]
    repo.save({name: pairs[name] for name in names}, "kinds@1")
    found = repo.load("kinds@1")
    assert type(found["parameter"]) is nn.Parameter
    assert type(found["plain"]) is torch.Tensor
    assert not found["plain"].requires_grad
    found["plain"].fill_(3)
    assert found["parameter"].tolist() == [3, 3, 3, 3]


def test_nothing_is_loaded_where_no_values_can_be(repo: Repository) -> None:
    real = nn.Linear(3, 4)
    repo.save(real, "line@1", sample=torch.ones(2, 3))
    with torch.device("meta"):
        shell = nn.Linear(3, 4)
    with pytest.raises(DoesNotFit, match="meta device"):
        repo.load("line@1", into=shell)
    with pytest.raises(DoesNotFit, match="meta device"):
        repo.load("line@1", into=dict(shell.state_dict()))
    with pytest.raises(DoesNotFit, match="meta device"):
        repo.transfer(shell, sample=torch.ones(2, 3))


def test_names_of_wrappers_in_dictionaries_come_back_to_where_they_were(repo: Repository) -> None:
    repo.save({"_orig_mod.x": torch.ones(4)}, "wrapped@1")
    repo.save({"x": torch.ones(4)}, "plain@1")
    for stored in ("wrapped@1", "plain@1"):
        into = {"_orig_mod.x": torch.zeros(4)}
        repo.load(stored, into=into)
        assert into["_orig_mod.x"].sum() == 4
    both = {"x": torch.zeros(4), "_orig_mod.x": torch.zeros(4)}
    with pytest.raises(DoesNotFit, match=r"_orig_mod\.x: missing in plain@1"):
        repo.load("plain@1", into=both)
    repo.load("plain@1", into=both, strict=False)
    assert (both["x"].sum(), both["_orig_mod.x"].sum()) == (4, 0)


def test_pairs_of_four_bits_are_loaded_and_compared(repo: Repository) -> None:
    pair = torch.float4_e2m1fn_x2
    before = torch.tensor([0x10, 0x32], dtype=torch.uint8)
    after = torch.tensor([0x10, 0xB2], dtype=torch.uint8)
    repo.save({"w": before.view(pair)}, "four@1")
    repo.save({"w": after.view(pair)}, "four@2", parent="four@1")
    (change,) = repo.diff("four@1", "four@2")
    assert (change.kind, change.largest) == ("changed", 3.0)  # 1.5 and -1.5
    into = {"w": torch.zeros(2, dtype=torch.uint8).view(pair)}
    repo.load("four@2", into=into)
    assert into["w"].view(torch.uint8).tolist() == after.tolist()
    with pytest.raises(DoesNotFit, match="float4_e2m1fn_x2 is stored, float32 is here"):
        repo.load("four@2", into={"w": torch.zeros(2)}, cast=True)
    module = nn.Module()
    module.register_buffer("w", torch.zeros(2, dtype=torch.uint8).view(pair))
    with pytest.raises(DoesNotFit, match="assign it"):
        repo.load("four@2", into=module)
