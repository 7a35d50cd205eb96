"""Differences of two versions: the numbers, what is read for them, and how they are ended."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from sapwood.report.store.comparison import Difference, differences, page_of, summary
from sapwood.report.store.jobs import Cancelled
from sapwood.repository.manifest import DTYPES
from sapwood.store import Repository
from sapwood.store.stored import StoredModel

Tensors = dict[str, Tensor]


def _ignore(done: int, total: int, name: str) -> None:
    """Nobody wants to know."""


def compared(repo: Repository, before: Tensors, after: Tensors) -> dict[str, Difference]:
    repo.save(before, "x@before")
    repo.save(after, "x@after")
    found = differences(repo.open("x@before"), repo.open("x@after"), {}, _ignore)
    plain = page_of(found, kind="", sort="relative", offset=0, limit=100)
    json.dumps(plain, allow_nan=False)
    return {one.name: one for one in found}


def test_numbers_are_those_of_the_command_line(repo: Repository) -> None:
    torch.manual_seed(0)
    before = {"a": torch.randn(2_000_003), "b": torch.randn(7).bfloat16(), "c": torch.zeros(3)}
    after = {
        "a": before["a"] + 0.1 * torch.randn(2_000_003),
        "b": before["b"] * 2,
        "c": before["c"],
    }
    found = compared(repo, before, after)
    for change in repo.diff("x@before", "x@after"):
        one = found[change.name]
        assert one.kind == change.kind
        assert one.largest == pytest.approx(change.largest, rel=1e-12)
        assert one.relative == pytest.approx(change.relative, rel=1e-9)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_is_compared_bit_by_bit(dtype: str, repo: Repository) -> None:
    bits = torch.zeros(160, dtype=torch.uint8)
    other = bits.clone()
    other[-1] = 1
    kind = getattr(torch, dtype)
    found = compared(repo, {"t": bits.view(kind)}, {"t": other.view(kind)})["t"]
    assert (found.kind, found.elements) == ("changed", 1)


def test_what_is_no_number_hides_nothing(repo: Repository) -> None:
    before = torch.tensor([1.0, 2.0, math.nan, math.inf])
    after = torch.tensor([1.5, math.nan, math.nan, 3.0])
    found = compared(repo, {"t": before}, {"t": after})["t"]
    assert (found.elements, found.odd, found.largest) == (3, 2, 0.5)
    assert found.relative == pytest.approx(0.5 / math.sqrt(5))


def test_from_zero_and_beyond_what_a_number_can_hold(repo: Repository) -> None:
    most = torch.finfo(torch.float64).max
    found = compared(
        repo,
        {"zero": torch.zeros(3), "huge": torch.full((2,), most, dtype=torch.float64)},
        {"zero": torch.ones(3), "huge": torch.full((2,), -most, dtype=torch.float64)},
    )
    assert found["zero"].relative == math.inf
    assert found["huge"].largest == math.inf
    assert not math.isnan(found["huge"].relative)


def test_shapes_and_names_that_differ(repo: Repository) -> None:
    found = compared(
        repo,
        {"same": torch.ones(2), "shape": torch.ones(2), "gone": torch.ones(1), "e": torch.ones(0)},
        {"same": torch.ones(2), "shape": torch.ones(3), "new": torch.ones(1), "e": torch.ones(0)},
    )
    assert {name: one.kind for name, one in found.items()} == {
        "same": "same", "shape": "reshaped", "gone": "removed", "new": "added", "e": "same",
    }  # fmt: skip
    totals = summary(list(found.values()))
    assert totals == {
        "tensors": 5, "changed": 0, "reshaped": 1, "added": 1, "removed": 1, "same": 2,
    }  # fmt: skip


def test_equal_tensors_are_not_read(family: Repository, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    blocks = StoredModel.blocks

    def counting(self: StoredModel, row: Any) -> Any:
        read.append(str(row.shape))
        return blocks(self, row)

    monkeypatch.setattr(StoredModel, "blocks", counting)
    family.save(family.load("b@1"), "stranger")  # equal, and found to be so afterwards
    family.flush()
    before, after = family.open("b@1"), family.open("stranger")
    canonical = family.canonical([*before.manifest.blobs, *after.manifest.blobs])
    assert canonical is not None
    assert summary(differences(before, after, canonical, _ignore))["same"] == 3
    assert read == []


def test_it_ends_when_it_is_told_to(repo: Repository) -> None:
    big = torch.randn(4_000_000)
    repo.save({"t": big}, "x@1")
    repo.save({"t": big + 1}, "x@2")
    seen: list[tuple[int, int]] = []

    def progress(done: int, total: int, name: str) -> None:
        seen.append((done, total))
        if done:
            raise Cancelled

    with pytest.raises(Cancelled):
        differences(repo.open("x@1"), repo.open("x@2"), {}, progress)
    assert 0 < seen[-1][0] < seen[-1][1] == 16_000_000
