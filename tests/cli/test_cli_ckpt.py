"""``sapwood ckpt`` on checkpoints made by hand, and damaged by hand."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open

import sapwood
from sapwood.cli.main import main
from sapwood.cli.verbs.ckpt.numbers import compare, decode
from sapwood.cli.verbs.ckpt.words import seconds
from sapwood.errors import ConfigError
from sapwood.state.catalog import Catalog
from sapwood.state.shards import plan_shards
from sapwood.tiers.local import LocalTier
from sapwood.tiers.packed import PackedTier
from sapwood.tiers.record import CheckpointId, describe
from tests.checkpoint.training import Training, same
from tests.cli.helpers import environment
from tests.tiers.shards import ATTEMPT, fill, plan, shard

WORLD = 2


def save(folder: str | Path, *steps: int, ranks=range(WORLD), **options) -> None:
    tier = LocalTier(Path(folder))
    for step in steps:
        for rank in ranks:
            tier.put(*shard(step, rank, WORLD, **options))


def name(step: int) -> str:
    return CheckpointId(step, ATTEMPT).folder


def ask(capsys, *arguments: str, code: int = 0):
    """The JSON answer of a verb."""
    assert main(["ckpt", *arguments, "--json"]) == code
    return json.loads(capsys.readouterr().out)


def told(capsys, *arguments: str, code: int = 0) -> str:
    assert main(["ckpt", *arguments]) == code
    return capsys.readouterr().out


def refused(capsys, *arguments: str) -> str:
    assert main(["ckpt", *arguments]) == 1
    return capsys.readouterr().err


def flip(path: Path, offset: int) -> None:
    content = bytearray(path.read_bytes())
    content[offset] ^= 1
    path.write_bytes(content)


def age(path: Path, by: float = 7200) -> None:
    for one in (path, *path.rglob("*")):
        os.utime(one, (time.time() - by,) * 2)


def tensor_bytes(step: int, file: str, tensor: str) -> bytes:
    """What ``save`` made of a tensor, put together without the code under test."""
    shards = plan(WORLD)
    whole = bytearray(shards.catalog.by_key[file, tensor].nbytes)
    for one in shards.shards:
        memory = fill(shards, one.rank, step)
        for piece in one.pieces:
            if piece.key == (file, tensor):
                whole[piece.start : piece.stop] = bytes(memory[piece.at : piece.at + piece.nbytes])
    return bytes(whole)


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


# -- prune ---------------------------------------------------------------------------------


def steps(capsys, *places: str) -> list[int]:
    return [row["step"] for row in ask(capsys, "ls", *places)]


def test_prune_says_what_would_go_and_does_it_when_told(capsys):
    save("ckpts", 5, 10, 15, 20)
    save("ckpts/nodes/n0", 10)
    text = told(capsys, "prune", "--last", "1", "--every", "10")
    assert f"would remove {name(5)}" in text
    assert f"would remove {name(15)}" in text
    assert steps(capsys) == [5, 10, 15, 20]
    told(capsys, "prune", "--last", "1", "--every", "10", "--yes")
    assert steps(capsys) == [10, 20]
    told(capsys, "prune", "--spaced", "1d", "--yes")
    assert steps(capsys) == [10, 20]
    told(capsys, "prune", "--last", "1", "--yes")
    assert steps(capsys) == [20]
    assert not list(Path("ckpts").rglob("00000010*"))


def test_prune_never_takes_the_newest_whole_one(capsys):
    save("ckpts", 5, 10)
    save("ckpts", 15, ranks=[0])
    text = told(capsys, "prune", "--every", "1000", "--yes")
    assert "1 that are not whole were left alone" in text
    assert steps(capsys) == [10, 15]


def test_prune_by_metric_wants_to_know_which_way(capsys):
    save("ckpts", 5)
    assert "--lower or --higher" in refused(capsys, "prune", "--best", "loss")
    assert "say what to keep" in refused(capsys, "prune")
    assert "belong to --best" in refused(capsys, "prune", "--lower", "--last", "1")
    assert "--spaced is 'soon'" in refused(capsys, "prune", "--spaced", "soon")


def test_lengths_of_time():
    assert [seconds(t, "--older") for t in ("90", "1.5m", "2h", "1d")] == [90, 90, 7200, 86400]
    with pytest.raises(ConfigError, match="expected a time"):
        seconds("-1h", "--older")


# -- repair --------------------------------------------------------------------------------


def leave_a_mess() -> list[Path]:
    save("ckpts", 5, 10)
    half_removed = Path("ckpts", name(1))
    half_removed.mkdir()
    (half_removed / "shard-0.bin").write_bytes(b"bytes without a record")
    draft = Path("ckpts", name(5), ".shard-0.bin.draft-99")
    draft.write_bytes(b"half")
    dropped = Path("ckpts", f"{name(2)}.dropped")
    dropped.mkdir()
    return [half_removed, draft, dropped]


def test_repair_leaves_what_is_young_and_does_nothing_unless_told(capsys):
    mess = leave_a_mess()
    assert "nothing to do" in told(capsys, "repair", "--yes")
    for path in mess:
        age(path)
    text = told(capsys, "repair")
    assert all(f"would remove {path} (untouched for 2h)" in text for path in mess)
    assert all(path.exists() for path in mess)


def test_repair_removes_what_dead_attempts_left(capsys):
    mess = leave_a_mess()
    for path in mess:
        age(path)
    told(capsys, "repair", "--yes")
    assert not any(path.exists() for path in mess)
    assert steps(capsys) == [5, 10]
    assert "all sound" in told(capsys, "verify")


def test_repair_leaves_alone_what_it_does_not_know(capsys):
    save("ckpts", 5)
    save("ckpts/nodes/n0/kept/partner", 5, ranks=[1])
    fragment = Path("ckpts/nodes/n0/kept/parity", name(5), "0-of-3.bin")
    notes = Path("ckpts", name(1), "notes.txt")
    hidden = Path("ckpts/.old", name(1), "shard-0.bin")
    for path in (fragment, notes, hidden):
        path.parent.mkdir(parents=True)
        path.write_bytes(b"precious")
        age(path.parent)
    assert "nothing to do" in told(capsys, "repair", "--incomplete", "--yes")
    assert all(path.exists() for path in (fragment, notes, hidden))
    (row,) = ask(capsys, "ls")
    assert [p["tier"] for p in row["places"].values()] == ["local", "partner"]


def test_repair_copies_lost_and_damaged_shards_back(capsys):
    save("ckpts", 5, 10)
    save("scratch/n0", 5, 10, ranks=[0])
    save("scratch/n1", 5, 10, ranks=[1])
    flip(Path("ckpts", name(5), "shard-0.bin"), 3)
    Path("ckpts", name(10), "shard-1.json").unlink()
    text = told(capsys, "repair", "--from", "scratch")
    assert f"would replace the damaged shard 0 of {name(5)}" in text
    assert f"would copy the missing shard 1 of {name(10)}" in text
    told(capsys, "verify", code=1)
    told(capsys, "repair", "--from", "scratch", "--yes")
    assert "all sound" in told(capsys, "verify")
    told(capsys, "diff", "5", "scratch/5")


def test_repair_puts_a_nodes_shards_back_on_that_node(capsys):
    save("ckpts", 5, 10)
    save("scratch/n0", 5, 10, ranks=[0])
    save("scratch/n1", 5, 10, ranks=[1])
    LocalTier(Path("scratch/n1")).drop(CheckpointId(10, ATTEMPT))
    told(capsys, "repair", "scratch", "--from", "ckpts", "--yes")
    assert Path("scratch/n1", name(10), "shard-1.json").exists()
    assert not Path("scratch/n0", name(10), "shard-1.json").exists()


def test_repair_never_copies_from_a_damaged_place(capsys):
    save("ckpts", 5)
    save("other", 5)
    for place in ("ckpts", "other"):
        flip(Path(place, name(5), "shard-0.bin"), 3)
    assert "nothing to do" in told(capsys, "repair", "--from", "other", "--yes")


def test_shards_that_are_stored_sparingly_are_read_and_mended(capsys):
    tier = PackedTier(Path("scratch/n0"))
    for step in (5, 10):
        for rank in range(WORLD):
            record, memory = shard(5, rank, WORLD)
            tier.put(replace(record, id=CheckpointId(step, ATTEMPT)), memory)
    assert list(Path("scratch/n0", name(10)).glob("*.base-0.bin"))
    assert "0 are not" in told(capsys, "diff", "scratch/5", "scratch/10")
    save("ckpts", 5)
    flip(Path("scratch/n0", name(5), "shard-0.bin"), 3)  # which both checkpoints refer to
    assert {
        d["checkpoint"] for d in ask(capsys, "verify", "--place", "scratch", code=1)["damages"]
    } == {
        name(5),
        name(10),
    }
    told(capsys, "repair", "scratch", "--from", "ckpts", "--yes")
    told(capsys, "verify", "scratch/5")
    told(capsys, "verify", "scratch/10", code=1)
    assert not list(Path("scratch").rglob("*.safetensors"))


def test_repair_fetches_a_newer_whole_one(capsys):
    save("ckpts", 5)
    save("other", 1, 10)
    told(capsys, "repair", "--from", "other", "--yes")
    assert steps(capsys) == [5, 10]


def test_incomplete_ones_go_only_when_asked_and_only_behind_a_whole_one(capsys):
    save("ckpts", 5, 15, ranks=[0])
    save("ckpts", 10)
    assert "nothing to do" in told(capsys, "repair")
    told(capsys, "repair", "--incomplete", "--yes")
    assert steps(capsys) == [10, 15]


def test_repair_finishes_and_mends_assembled_checkpoints(capsys):
    external = pytest.importorskip("sapwood.tiers.external")
    tier = external.ExternalTier(Path("ckpts"))
    for step in (5, 10):
        for rank in range(WORLD):
            tier.put(*shard(step, rank, WORLD))
    Path("ckpts", name(10), "manifest.json").unlink()
    Path("ckpts", name(10)).rename(Path("ckpts", f"{name(10)}.partial"))
    tier.put(*shard(15, 0, WORLD))
    age(Path("ckpts"))
    save("scratch", 5)
    flip(Path("ckpts", name(5), "model.safetensors"), 5000)
    flip(Path("ckpts", name(5), "optimizer.safetensors"), 30)  # in its header
    damages = ask(capsys, "verify", "5", code=1)["damages"]
    assert [d["tensor"] for d in damages] == ["large", None]
    assert "optimizer.safetensors" in damages[1]["problem"]
    states = [row["state"] for row in ask(capsys, "ls")]
    assert states == ["whole", "whole, not published", "shard 1 missing"]
    told(capsys, "repair", "--from", "scratch", "--yes")
    assert [r["state"] for r in ask(capsys, "ls")] == ["whole", "whole", "shard 1 missing"]
    told(capsys, "verify", "5", "10")


# -- export --------------------------------------------------------------------------------


def test_export_writes_a_file_that_safetensors_reads(capsys):
    save("ckpts", 5)
    told(capsys, "export", "latest", "model.safetensors")
    with safe_open("model.safetensors", "pt") as found:
        assert sorted(found.keys()) == ["empty", "half", "large", "small"]
        assert found.get_tensor("half").dtype == torch.bfloat16
        assert found.get_tensor("small").shape == (3, 5)
        assert found.get_tensor("large").numpy().tobytes() == tensor_bytes(5, "model", "large")
    told(capsys, "export", "latest", "some.safetensors", "--tensors", "s*")
    with safe_open("some.safetensors", "pt") as found:
        assert list(found.keys()) == ["small"]
    assert "never overwritten" in refused(capsys, "export", "5", "model.safetensors")
    assert "ends in .safetensors" in refused(capsys, "export", "5", "model.txt")
    assert "cannot write" in refused(capsys, "export", "5", "no/such/folder/model.safetensors")


def test_export_of_a_damaged_checkpoint_leaves_no_file(capsys):
    save("ckpts", 5)
    flip(Path("ckpts", name(5), "shard-0.bin"), 3)
    assert "do not match" in refused(capsys, "export", "5", "model.safetensors")
    assert not list(Path().glob("*model*")) + list(Path().glob(".*model*"))


def test_export_reads_around_damage_where_there_is_another_copy(capsys):
    save("ckpts", 5)
    save("ckpts/nodes/n0", 5)
    flip(Path("ckpts", name(5), "shard-0.bin"), 3)
    told(capsys, "export", "5", "model.safetensors", "--optimizer")
    with safe_open("model.safetensors", "pt") as found:
        for file, tensor in (("model", "large"), ("optimizer", "large/momentum_buffer")):
            assert found.get_tensor(tensor).numpy().tobytes() == tensor_bytes(5, file, tensor)


def test_only_export_to_pt_needs_torch(tmp_path):
    save("ckpts", 5, 10)
    code = (
        "import sys\n"
        "sys.modules['torch'] = None\n"
        "from sapwood.cli.main import main\n"
        "for verb in (['ls'], ['inspect'], ['verify'], ['diff', '5', '5'], ['repair'],\n"
        "             ['prune', '--last', '2'], ['export', '5', 'out.safetensors']):\n"
        "    assert main(['ckpt', *verb]) == 0, verb\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment(tmp_path),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert Path("out.safetensors").exists()


# -- of a real training --------------------------------------------------------------------


@pytest.fixture
def trained(tmp_path) -> Training:
    """Three checkpoints of a training of one rank, with a loss that gets better and worse."""
    training = Training(tmp_path)
    with sapwood.Checkpointer(training.run, "ckpts", engine="sync", keep=None) as saver:
        for step, loss in ((1, 2.0), (2, 0.5), (3, 1.0)):
            training.steps(until=step)
            saver.save(metrics={"loss": loss})
    training.close()
    return training


def test_a_training_can_be_inspected_exported_and_pruned(trained, capsys):
    facts = ask(capsys, "inspect")["extras"]
    assert facts["learning_rates"] == [g["lr"] for g in trained.optimizer.param_groups]
    assert {"python", "numpy", "torch"} <= set(facts["random_states"]["rank 0"])
    assert facts["metrics"] == {"loss": 1.0}
    assert len(told(capsys, "inspect")) < 8000

    told(capsys, "export", "latest", "model.pt")
    found = torch.load("model.pt", weights_only=True)
    assert same(found, trained.model.state_dict())

    told(capsys, "export", "latest", "all.pt", "--optimizer")
    everything = torch.load("all.pt", weights_only=True)
    assert same(everything["model"], trained.model.state_dict())
    moments = everything["optimizer"]["state"]["head.weight"]
    assert same(moments, dict(trained.optimizer.state[trained.model.head.weight]))
    assert everything["step"] == 3

    told(capsys, "prune", "--best", "loss", "--lower", "--yes")
    assert steps(capsys) == [2, 3]
