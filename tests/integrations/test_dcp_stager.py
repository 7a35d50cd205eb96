"""The stager: its copies do not change, and its memory is used again, but never too early."""

from __future__ import annotations

import errno
import gc
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from sapwood.errors import ConfigError, DeadlineError, UsageError
from sapwood.integrations.dcp import SapwoodReader, SapwoodStager, SapwoodWriter
from sapwood.integrations.dcp import stager as stager_module

Pair = namedtuple("Pair", "left right")


def state() -> dict[str, Any]:
    return {
        "a": torch.randn(40, 3),
        "deep": [torch.tensor(2.5), {"b": torch.ones(5, dtype=torch.bfloat16)}, "text", 3],
        "pair": Pair(torch.arange(4), None),
        "empty": torch.empty(0, 2),
        "turned": torch.randn(4, 6).t(),
    }


def address(staged: dict[str, Any]) -> int:
    return staged["a"].untyped_storage().data_ptr()


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_a_staged_copy_has_the_same_values_and_no_memory_in_common():
    stager = SapwoodStager()
    original = state()
    before = original["a"].clone()
    staged = stager.stage(original)
    original["a"].zero_()
    original["deep"][0].zero_()
    original["deep"].append("later")
    assert torch.equal(staged["a"], before)
    assert staged["deep"][0] == 2.5
    assert len(staged["deep"]) == 4
    assert staged["deep"][1]["b"].dtype == torch.bfloat16
    assert isinstance(staged["pair"], Pair)
    assert staged["pair"].left.tolist() == [0, 1, 2, 3]
    assert staged["empty"].shape == (0, 2)
    assert torch.equal(staged["turned"], original["turned"])
    stager.close()


def test_memory_is_used_again_once_nothing_of_a_save_is_left():
    stager = SapwoodStager(buffers=1, timeout=0.05)
    staged = stager.stage(state())
    first = address(staged)
    last: Tensor = staged["deep"][0].view(-1)[:]
    del staged
    with pytest.raises(DeadlineError, match="1 saves are under way"):
        stager.stage(state())
    assert last.item() == 2.5
    del last
    gc.collect()
    assert address(stager.stage(state())) == first
    stager.close()


def test_a_larger_state_gets_larger_memory():
    stager = SapwoodStager(buffers=1, timeout=1)
    assert stager.stage(state())["a"].shape == (40, 3)
    larger = {"a": torch.randn(4000, 30)}
    assert torch.equal(stager.stage(larger)["a"], larger["a"])
    stager.close()


def test_closing_leaves_no_descriptor_behind_also_while_a_save_is_under_way():
    gc.collect()
    before = descriptors()
    stager = SapwoodStager()
    staged = stager.stage(state())
    stager.stage(state())
    stager.close()
    assert staged["deep"][0] == 2.5
    del staged
    gc.collect()
    assert descriptors() == before
    with pytest.raises(UsageError, match="closed"):
        stager.stage(state())


def test_bad_settings_are_refused():
    with pytest.raises(ConfigError, match="buffers=0"):
        SapwoodStager(buffers=0)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_saves_in_the_background_take_turns_with_two_buffers():
    stager = SapwoodStager(timeout=60)
    weight = torch.zeros(1000)
    futures = []
    for _ in range(6):
        weight += 1
        writer = SapwoodWriter("ckpts", keep=None)
        futures.append(
            dcp.async_save(
                {"weight": weight}, storage_writer=writer, async_stager=stager, no_dist=True
            )
        )
    for future in futures:
        future.result(timeout=60)
    stager.close()
    found = []
    for home in sorted(Path("ckpts").glob("dcp-*")):
        loaded = {"weight": torch.zeros(1000)}
        dcp.load(loaded, storage_reader=SapwoodReader("ckpts", save=home.name))
        assert len(loaded["weight"].unique()) == 1, "a torn save"
        found.append(int(loaded["weight"][0]))
    assert sorted(found) == [1, 2, 3, 4, 5, 6]


def test_a_save_without_memory_takes_no_buffer_from_those_after_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    stager = SapwoodStager(buffers=1, timeout=0.05)
    with monkeypatch.context() as patch:
        patch.setattr(stager_module, "Arena", fail)
        for _ in range(2):
            with pytest.raises(OSError, match="Cannot allocate"):
                stager.stage(state())
    stager.stage(state())
    stager.close()
