"""``sapwood ckpt`` verbs that only look: ls, inspect, verify, diff."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from sapwood.cli.verbs.ckpt.numbers import compare, decode
from sapwood.state.catalog import Catalog
from sapwood.state.shards import plan_shards
from sapwood.tiers.local import LocalTier
from sapwood.tiers.record import CheckpointId, describe
from tests.cli.checkpoints import WORLD, ask, flip, name, refused, save, tensor_bytes, told
from tests.tiers.shards import ATTEMPT, plan

# -- ls ------------------------------------------------------------------------------------


def test_ls_lists_the_newest_last_with_where_each_is(capsys):
    save("ckpts", 5, 15, 10)
    save("ckpts/nodes/n0", 15, ranks=[0])
    save("ckpts/nodes/n1", 15, ranks=[1])
    rows = ask(capsys, "ls")
    assert [row["step"] for row in rows] == [5, 10, 15]
    assert all(row["whole"] and row["world"] == WORLD for row in rows)
    assert [p["shards"] for p in rows[2]["places"].values()] == [[0, 1], [0], [1]]
    assert rows[2]["bytes"] == plan(WORLD).catalog.nbytes
    text = told(capsys, "ls")
    assert len(text.splitlines()) == 4
    assert "whole" in text
    assert "local:3" in text


def test_ls_puts_the_shards_of_several_nodes_and_places_together(capsys):
    save("scratch/n0", 5, ranks=[0])
    save("scratch/n1", 5, ranks=[1])
    assert ask(capsys, "ls", "scratch")[0]["state"] == "whole"
    assert ask(capsys, "ls", "scratch/n0")[0]["state"] == "shard 1 missing"
    assert ask(capsys, "ls", "scratch/n0", "scratch/n1")[0]["whole"]


def test_ls_says_what_is_missing_damaged_or_only_a_draft(capsys):
    save("ckpts", 5, 10, 15)
    save("ckpts", 20, ranks=[0])
    flip(Path("ckpts", name(5), "shard-1.json"), 40)
    os.truncate(Path("ckpts", name(10), "shard-0.bin"), 100)
    Path("ckpts", name(25)).mkdir()
    Path("ckpts", name(25), ".shard-0.bin.draft-77").write_bytes(b"half")
    rows = {row["step"]: row for row in ask(capsys, "ls")}
    assert rows[5]["state"] == "shard 1 damaged"
    assert "checksum" in rows[5]["problems"][0]
    assert rows[10]["state"] == "shard 0 damaged"
    assert rows[15]["state"] == "whole"
    assert rows[20]["state"] == "shard 1 missing"
    assert rows[20]["missing"] == [1]
    assert rows[25]["state"] == "partial"
    assert "shard-1.json is damaged" in told(capsys, "ls")


def test_another_copy_makes_it_whole(capsys):
    save("ckpts", 5)
    save("ckpts/nodes/n0", 5)
    flip(Path("ckpts", name(5), "shard-1.json"), 40)
    (row,) = ask(capsys, "ls")
    assert row["whole"]
    assert row["state"] == "whole, a copy of shard 1 damaged"


# -- arguments -----------------------------------------------------------------------------


def test_errors_name_the_place_and_what_there_is(capsys):
    assert "there is no folder ckpts" in refused(capsys, "ls")
    Path("empty").mkdir()
    assert "no checkpoints in empty" in refused(capsys, "ls", "empty")
    save("ckpts", 5, 10)
    text = refused(capsys, "inspect", "99")
    assert "no checkpoint '99' in ckpts" in text
    assert name(5) in text
    assert name(10) in text
    Path("ckpts", name(10), "shard-0.json").unlink()
    assert "not whole: shard 0 missing" in refused(capsys, "diff", "5", "10")


def test_a_checkpoint_is_a_step_an_id_or_latest_in_any_place(capsys):
    save("other", 5, 10)
    save("other", 15, ranks=[0])
    save("other", 10, attempt="ffffff")
    for argument, found in [
        ("other/5", name(5)),
        (f"other/{name(10)}", name(10)),
        (f"other/{name(10)}/", name(10)),
        ("other/00000005", name(5)),
        ("other/latest", "00000010-ffffff"),
        ("other/15", name(15)),
    ]:
        assert ask(capsys, "inspect", argument)["id"] == found
        if not argument.endswith("/"):
            just = argument.rpartition("/")[2]
            assert ask(capsys, "inspect", just, "--place", "other")["id"] == found


def test_a_step_that_a_later_attempt_only_began_is_still_found(capsys):
    save("ckpts", 5)
    save("ckpts", 5, attempt="ffffff", ranks=[1])
    assert ask(capsys, "inspect", "5")["id"] == name(5)


@pytest.mark.parametrize("verb", ["ls", "inspect", "verify", "diff", "repair", "prune", "export"])
def test_the_help_of_each_verb_teaches_with_examples(verb, capsys):
    text = told(capsys, verb, "--help")
    assert text.count(f"sapwood ckpt {verb}") >= 3
    assert verb in told(capsys, "--help")


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
def test_an_export_that_cannot_be_written_is_one_line(suffix, capsys):
    save("ckpts", 5)
    out = f"nowhere/model{suffix}"
    assert f"cannot write {out}: No such file or directory" in refused(
        capsys, "export", "latest", out
    )


# -- inspect -------------------------------------------------------------------------------


def test_inspect_shows_tensors_shards_and_extras(capsys):
    save("ckpts", 5)
    found = ask(capsys, "inspect", "5", "--tensors", "large*")
    assert [row["name"] for row in found["tensors"]] == ["large", "large/momentum_buffer"]
    assert found["tensors"][0]["shape"] == [WORLD, 32768]
    assert found["files"]["model"]["tensors"] == 4
    assert [row["rank"] for row in found["shards"]] == [0, 1]
    assert sum(row["bytes"] for row in found["shards"]) == plan(WORLD).catalog.nbytes
    assert found["extras"]["step"] == 5
    text = told(capsys, "inspect")
    assert "BF16" in text
    assert "[2, 32768]" in text
    assert "no tensor fits 'x*'" in refused(capsys, "inspect", "5", "--tensors", "x*")


# -- verify --------------------------------------------------------------------------------


def test_verify_finds_nothing_wrong_with_what_is_right(capsys):
    save("ckpts", 5, 10)
    assert "all sound" in told(capsys, "verify")
    assert ask(capsys, "verify", "latest")["checked"] == [name(10)]


def test_verify_names_the_tensor_and_its_bytes(capsys):
    save("ckpts", 5, 10)
    piece = plan(WORLD).shards[1].by_key["optimizer", "large/momentum_buffer"]
    flip(Path("ckpts", name(10), "shard-1.bin"), piece.at + 7)
    (damage,) = ask(capsys, "verify", code=1)["damages"]
    assert damage["checkpoint"] == name(10)
    assert (damage["shard"], damage["file"]) == (1, "optimizer")
    assert damage["tensor"] == "large/momentum_buffer"
    assert (damage["start"], damage["stop"]) == (piece.start, piece.stop)
    text = told(capsys, "verify", code=1)
    assert f"{name(5)}: ok" in text
    assert f"bytes {piece.start} to {piece.stop} of optimizer large/momentum_buffer" in text
    assert told(capsys, "verify", "5")


def test_verify_reports_every_damage_not_only_the_first(capsys):
    save("ckpts", 5, 10)
    for one in plan(WORLD).shards[0].pieces[:2]:
        flip(Path("ckpts", name(5), "shard-0.bin"), one.at)
    os.truncate(Path("ckpts", name(5), "shard-1.bin"), 10)
    Path("ckpts", name(10), "shard-1.json").unlink()
    Path("ckpts", f"{name(15)}.partial").mkdir()
    damages = ask(capsys, "verify", code=1)["damages"]
    assert [d["shard"] for d in damages] == [0, 0, 1, 1, None]
    assert "missing" in damages[3]["problem"]
    assert "never finished" in damages[4]["problem"]


# -- diff ----------------------------------------------------------------------------------


def test_diff_of_a_checkpoint_with_its_copy_is_empty(capsys):
    save("ckpts", 5)
    save("copy", 5)
    assert "0 are not" in told(capsys, "diff", "5", "copy/latest")


def test_diff_counts_and_measures(capsys):
    save("ckpts", 5, 10)
    rows = {r["name"]: r for r in ask(capsys, "diff", "5", "10", code=1)["tensors"]}
    left, right = (np.frombuffer(tensor_bytes(s, "model", "large"), "<f4") for s in (5, 10))
    bits = left.view("u4") != right.view("u4")
    with np.errstate(all="ignore"):
        apart = np.abs(left.astype(float) - right.astype(float))
    assert rows["large"]["elements"] == bits.sum()
    assert rows["large"]["largest"] == apart[np.isfinite(apart)].max()
    assert rows["large"]["not_finite"] == (bits & ~np.isfinite(apart)).sum()
    assert rows["empty"]["what"] == "same"
    assert "changed" in told(capsys, "diff", "5", "10", "--tensors", "small", code=1)


def test_diff_names_tensors_of_one_side_and_of_another_kind(capsys):
    save("ckpts", 5)
    save("other", 5, large=2**15 + 1)
    rows = {r["name"]: r for r in ask(capsys, "diff", "5", "other/5", code=1)["tensors"]}
    assert rows["large"]["what"] == "other kind"
    assert rows["large"]["other"]["shape"] == [WORLD, 2**15 + 1]
    text = told(capsys, "diff", "5", "other/5", code=1)
    assert "in A" in text


def reshard(folder: str, step: int, world: int, change: int | None = None) -> None:
    """The checkpoint of ``save``, as another number of ranks would have saved it."""
    tensors = {e.key: bytearray(tensor_bytes(step, *e.key)) for e in plan(WORLD).catalog.entries}
    if change is not None:
        tensors["model", "large"][change] ^= 1
    everyone = tuple(range(world))
    entries = (replace(e, holders=everyone) for e in plan(WORLD).catalog.entries)
    shards = plan_shards(Catalog(tuple(entries)), world)
    for one in shards.shards:
        memory = bytearray(one.nbytes)
        for piece in one.pieces:
            memory[piece.at : piece.at + piece.nbytes] = tensors[piece.key][
                piece.start : piece.stop
            ]
        record = describe(
            id=CheckpointId(step, ATTEMPT),
            world=world,
            catalog=shards.catalog,
            shard=one,
            data=memory,
            created=1.0,
            extras={},
        )
        LocalTier(Path(folder)).put(record, memory)


def test_a_diff_of_other_numbers_of_ranks_compares_the_same_bytes(capsys):
    save("ckpts", 5)
    reshard("three", 5, 3)
    reshard("one", 5, 1, change=200_001)
    assert "0 are not" in told(capsys, "diff", "5", "three/5")
    rows = {r["name"]: r for r in ask(capsys, "diff", "three/5", "one/5", code=1)["tensors"]}
    assert {n: r["bytes"] for n, r in rows.items() if r["bytes"]} == {"large": 1}


@pytest.mark.parametrize(
    ("dtype", "kind"),
    [
        ("BF16", torch.bfloat16),
        ("F16", torch.float16),
        ("F8_E5M2", torch.float8_e5m2),
        ("F8_E4M3", torch.float8_e4m3fn),
        ("F64", torch.float64),
    ],
)
def test_bytes_are_decoded_as_torch_does(dtype, kind):
    raw = np.random.default_rng(3).integers(0, 256, 4096, np.uint8)
    raw[:512:2] = raw[1:512:2] = np.arange(256)
    expected = torch.from_numpy(raw.copy()).view(kind).to(torch.float64).numpy()
    with np.errstate(all="ignore"):
        np.testing.assert_array_equal(decode(raw, dtype).astype(np.float64), expected)


def test_a_number_that_became_infinite_is_not_hidden():
    left = np.array([1.0, 2.0, 3.0], np.float32)
    right = np.array([1.0, np.inf, 3.5], np.float32)
    found = compare(left.tobytes(), right.tobytes(), "F32")
    assert (found.elements, found.not_numbers, found.largest) == (2, 1, 0.5)
