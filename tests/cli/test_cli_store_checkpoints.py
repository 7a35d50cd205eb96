"""``sapwood store put`` of runs and checkpoints: which one is meant, and what comes of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import safetensors.torch
import torch

import sapwood as sapwood_package
from sapwood.cli.main import main
from sapwood.store import open as open_repository
from tests.checkpoint.training import Training, make_model
from tests.cli.checkpoints import flip, name, save, tensor_bytes

Put = Callable[..., str]


@pytest.fixture
def put(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture) -> Put:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SAPWOOD_STORE", raising=False)

    def call(*words: str, code: int = 0) -> str:
        assert main(["store", "put", *words]) == code
        text = capsys.readouterr()
        return text.err if code else text.out

    return call


def test_a_run_is_saved_with_its_lineage_and_loads_into_its_model(put: Put, tmp_path: Path) -> None:
    training = Training(tmp_path)
    with sapwood_package.Checkpointer(training.run, training.run.folder / "ckpts", keep=None) as c:
        training.steps(1)
        c.save(metrics={"val_acc": 0.25, "odd": float("nan")})
        training.steps(3)
        c.save(metrics={"val_acc": 0.75})
        c.wait()
    states = training.model.state_dict()
    training.close()
    folder = str(training.run.folder)
    assert "saved nt3/x@end" in put(folder, "nt3/x@end", "--tag", "best", "--metric", "more=1")
    assert "not a number, and not kept: odd" in put(f"{folder}/ckpts/1", "nt3/x@first")
    put(f"{folder}/ckpts/latest", "nt3/x@whole", "--optimizer")
    with open_repository(tmp_path / "models", create=False) as repo:
        model = make_model(frozen=True)
        repo.load("nt3/x@best", into=model)
        assert all(torch.equal(value, states[key]) for key, value in model.state_dict().items())
        assert repo.info("nt3/x@end").metrics == {"val_acc": 0.75, "more": 1.0}
        note = repo.info("nt3/x@end").note["imported"]
        assert (note["step"], note["run"], note["ranks"]) == (3, training.run.folder.name, 1)
        assert note["restored"] == []
        assert repo.info("nt3/x@first").note["imported"]["step"] == 1
        whole = repo.load("nt3/x@whole")
        assert whole["step"] == 3
        assert set(whole) == {"model", "optimizer", "step"}
        assert [r.version for r in repo.find("val_acc > 0.5 and has more")] == ["end"]


@pytest.mark.parametrize(
    "source", ["ckpts", "ckpts/", "ckpts/latest", "ckpts/10", f"ckpts/{name(10)}", ".", "s3"]
)
def test_every_way_to_name_a_checkpoint(source: str, put: Put, tmp_path: Path) -> None:
    save("ckpts", 5, 10)
    if source == "s3":
        source = str(tmp_path / "ckpts" / name(10)) + "/"
    put(source, "a@1")
    with open_repository("models", create=False) as repo:
        assert repo.info("a@1").note["imported"]["checkpoint"] == name(10)
        large = repo.load("a@1")["large"]
        assert large.numpy().tobytes() == tensor_bytes(10, "model", "large")


def test_a_folder_that_is_called_like_a_step_may_be_a_model(put: Put, tmp_path: Path) -> None:
    (tmp_path / "2024").mkdir()
    safetensors.torch.save_file({"a": torch.ones(2)}, tmp_path / "2024/model.safetensors")
    (tmp_path / "2024/config.json").write_text("{}")
    assert "1 tensors and 1 files" in put("2024", "a@1")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["ckpts/7", "a@1"], "no checkpoint '7' in ckpts"),
        (["nowhere/7", "a@1"], "there is no folder nowhere"),
        (["nowhere", "a@1"], "there is no nowhere"),
        (["ckpts", "a@1", "--without", "*.bin"], "is a checkpoint"),
        (["a.pt", "a@1", "--optimizer"], "--optimizer is for checkpoints"),
        (["run", "a@1"], "has no checkpoint in its folder"),
        (["empty", "a@1"], "holds no .safetensors files"),
        ([f"ckpts/{name(15)}", "a@1"], "do not match"),
        (["ckpts/20", "a@1"], "is not whole: shard 1 missing"),
    ],
)
def test_what_is_none_is_said_in_a_line(
    words: list[str], said: str, put: Put, tmp_path: Path
) -> None:
    save("ckpts", 5, 15)
    save("ckpts", 20, ranks=[0])
    flip(Path("ckpts", name(15), "shard-0.bin"), 3)
    for folder in ("empty", "run"):
        (tmp_path / folder).mkdir()
    (tmp_path / "run/run.toml").write_text('id = "run"\n')
    torch.save({"a": torch.ones(1)}, tmp_path / "a.pt")
    assert said in put(*words, code=1)
    if (tmp_path / "models").exists():
        with open_repository("models") as repo:
            assert repo.models() == []


def test_notes_are_json(put: Put, capsys: pytest.CaptureFixture) -> None:
    save("ckpts", 5)
    put("ckpts", "a@1")
    assert main(["store", "ls", "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert found["note"]["imported"]["places"] == ["local ckpts"]
