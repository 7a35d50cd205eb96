"""``sapwood ckpt`` verbs that write or remove: prune, repair, export."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, load_model

import sapwood
from sapwood.testing import ranks
from sapwood.tiers.external import ExternalTier
from sapwood.tiers.local import LocalTier
from sapwood.tiers.packed import PackedTier
from sapwood.tiers.record import CheckpointId
from tests.checkpoint.training import Training, same
from tests.cli.checkpoints import WORLD, age, ask, flip, name, refused, save, tensor_bytes, told
from tests.cli.helpers import environment
from tests.tiers.shards import ATTEMPT, shard

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
    assert "say --lower or --higher" in refused(capsys, "prune", "--best", "score")
    assert "--lower or --higher" in refused(capsys, "prune", "--best", "acc_loss")
    both = ("--best", "loss", "--lower", "--higher")
    assert "either --lower or --higher" in refused(capsys, "prune", *both)
    assert "say what to keep" in refused(capsys, "prune")
    assert "belong to --best" in refused(capsys, "prune", "--lower", "--last", "1")
    assert "--spaced is 'soon'" in refused(capsys, "prune", "--spaced", "soon")
    assert "--older is '-1h'" in refused(capsys, "repair", "--older=-1h")


def test_prune_keeps_the_best_and_the_newest_as_documented(trained, capsys):
    told(capsys, "prune", "--last", "1", "--best", "loss", "--yes")
    assert steps(capsys) == [2, 3]


def test_prune_by_a_metric_that_nobody_saved_is_an_error(trained, capsys):
    text = refused(capsys, "prune", "--best", "lsos", "--lower", "--yes")
    assert "no checkpoint here has that metric; there is loss" in text
    assert steps(capsys) == [1, 2, 3]


def test_prune_verifies_what_stays_before_anything_goes(capsys):
    save("ckpts", 5, 10, 15, 20)
    for step in (15, 20):
        flip(Path("ckpts", name(step), "shard-1.bin"), 3)
    text = told(capsys, "prune", "--last", "1", "--yes", code=1)
    assert f"{name(20)} is damaged" in text
    assert f"{name(15)} is damaged" in text
    assert "do not match their checksum" in text
    assert steps(capsys) == [10, 15, 20]
    told(capsys, "verify", "10")
    told(capsys, "prune", "--last", "1", "--yes", code=1)
    assert steps(capsys) == [10, 15, 20]


def test_prune_removes_nothing_where_nothing_is_sound(capsys):
    save("ckpts", 5, 10)
    for step in (5, 10):
        flip(Path("ckpts", name(step), "shard-0.bin"), 3)
    told(capsys, "prune", "--last", "1", "--yes", code=1)
    assert steps(capsys) == [5, 10]


def test_prune_needs_one_sound_copy_of_each_shard(capsys):
    save("ckpts", 5, 10)
    save("ckpts/nodes/n0", 10)
    flip(Path("ckpts", name(10), "shard-0.bin"), 3)
    flip(Path("ckpts/nodes/n0", name(10), "shard-1.bin"), 3)
    told(capsys, "prune", "--last", "1", "--yes")
    assert steps(capsys) == [10]


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
    text = told(capsys, "repair", "--from", "other", "--yes", code=1)
    assert f"beyond repair: {name(5)}: shard 0 is damaged" in text
    assert "nothing can be done" in text


def test_repair_says_what_is_beyond_repair(capsys):
    save("ckpts", 5, 10, 15)
    flip(Path("ckpts", name(5), "shard-1.bin"), 3)
    Path("ckpts", name(10), "shard-0.json").unlink()
    text = told(capsys, "repair", code=1)
    assert f"beyond repair: {name(5)}: shard 1 is damaged; in local ckpts: " in text
    assert f"beyond repair: {name(10)}: shard 0 is missing" in text
    assert "--from" in text
    # They go only when asked to, and only behind one that is sound.
    text = told(capsys, "repair", "--incomplete", "--yes")
    assert f"remove {name(5)} from local ckpts (damaged)" in text
    assert steps(capsys) == [15]
    flip(Path("ckpts", name(15), "shard-0.bin"), 3)
    save("ckpts", 10, ranks=[0])
    told(capsys, "repair", "--incomplete", "--yes", code=1)
    assert steps(capsys) == [10, 15]


def test_repair_mends_one_copy_from_another_in_the_same_place(capsys):
    tier = ExternalTier(Path("ckpts"))
    for rank in range(WORLD):
        tier.put(*shard(5, rank, WORLD))
    save("ckpts/nodes/n0", 5)
    flip(Path("ckpts", name(5), "model.safetensors"), 5000)
    flip(Path("ckpts/nodes/n0", name(5), "shard-1.bin"), 3)
    told(capsys, "verify", code=1)
    told(capsys, "repair", "--yes")
    assert "all sound" in told(capsys, "verify")


def test_repair_writes_a_manifest_anew(capsys):
    tier = ExternalTier(Path("ckpts"))
    for step in (5, 10):
        for rank in range(WORLD):
            tier.put(*shard(step, rank, WORLD))
    flip(Path("ckpts", name(5), "manifest.json"), 40)
    Path("ckpts", name(10), "manifest.json").unlink()
    told(capsys, "verify", code=1)
    text = told(capsys, "repair", "--yes")
    assert f"write the manifest of {name(5)}" in text
    assert "all sound" in told(capsys, "verify")
    assert "nothing to do" in told(capsys, "repair")


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
    text = told(capsys, "repair", "scratch", "--from", "ckpts", "--yes", code=1)
    assert f"beyond repair: {name(10)}" in text
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
    assert "nothing can be done" in told(capsys, "repair", code=1)
    told(capsys, "repair", "--incomplete", "--yes", code=1)  # 15 is lost, and the newest
    assert steps(capsys) == [10, 15]


def test_repair_finishes_and_mends_assembled_checkpoints(capsys):
    tier = ExternalTier(Path("ckpts"))
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
    text = told(capsys, "repair", "--from", "scratch", "--yes")
    assert f"left alone: {name(15)} is not finished: shard 1 is missing" in text
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


class Tied(torch.nn.Module):
    """A head that is the embedding, one layer under two names, and a buffer two modules share."""

    def __init__(self) -> None:
        super().__init__()
        self.wte = torch.nn.Embedding(7, 4)
        self.block = torch.nn.Linear(4, 4)
        self.again = self.block
        self.norm = torch.nn.BatchNorm1d(4)
        self.other = torch.nn.BatchNorm1d(4)
        self.other.running_mean = self.norm.running_mean
        self.register_buffer("mask", torch.ones(4), persistent=False)
        self.lm_head = torch.nn.Linear(4, 7, bias=False)
        self.lm_head.weight = self.wte.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.again(torch.relu(self.block(self.wte(x))))
        return self.lm_head(self.other(self.norm(x)) * self.mask)


def train_tied() -> None:
    torch.manual_seed(0)
    model = Tied()
    with sapwood.Run(model, torch.optim.Adam(model.parameters(), lr=0.1)) as run:
        with sapwood.Checkpointer(run, "ckpts", engine="sync", every=2):
            for _ in range(2):
                run.model(torch.arange(7)).square().sum().backward()
                run.step()
        torch.save(model.state_dict(), f"expected-{run.rank}.pt")


@pytest.mark.parametrize("world", [1, 2])
def test_tied_weights_are_exported_under_all_their_names(world: int, capsys) -> None:
    ranks.spawn(train_tied, world, timeout=100)
    expected = torch.load("expected-0.pt", weights_only=True)
    told(capsys, "export", "latest", "model.pt")
    told(capsys, "export", "latest", "model.safetensors")
    told(capsys, "export", "latest", "all.pt", "--optimizer")
    for found in (
        torch.load("model.pt", weights_only=True),
        load_file("model.safetensors"),
        torch.load("all.pt", weights_only=True)["model"],
    ):
        assert same(found, expected)
        model = Tied()
        model.load_state_dict(found, strict=True)
        assert same(model.state_dict(), expected)
    both = torch.load("model.pt", weights_only=True)
    assert both["lm_head.weight"].data_ptr() == both["wte.weight"].data_ptr()
    told(capsys, "export", "latest", "head.safetensors", "--tensors", "lm_head.*")
    assert list(load_file("head.safetensors")) == ["lm_head.weight"]
    # The external tier's own file has each tensor once, which its format's own loader completes.
    (assembled,) = Path("ckpts").rglob("model.safetensors")
    assert len(load_file(assembled)) < len(expected)
    model = Tied()
    assert load_model(model, assembled, strict=True) == (set(), [])
    assert same(model.state_dict(), expected)
