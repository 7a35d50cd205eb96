"""``sapwood store``: every verb, and what is said of wrong input."""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import nn

from sapwood.cli.main import main

Sapwood = Callable[..., tuple[int, str, str]]


@pytest.fixture
def sapwood(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Sapwood:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SAPWOOD_STORE", raising=False)

    def call(*words: str) -> tuple[int, str, str]:
        code = main(["store", *words])
        text = capsys.readouterr()
        return code, text.out, text.err

    return call


@pytest.fixture
def model(tmp_path: Path) -> nn.Sequential:
    torch.manual_seed(0)
    made = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    safetensors.torch.save_file(made.state_dict(), tmp_path / "a.safetensors")
    torch.save(made.state_dict(), tmp_path / "a.pt")
    return made


def test_a_model_goes_in_and_comes_out_the_same(sapwood: Sapwood, model: nn.Module) -> None:
    assert (
        sapwood("put", "a.safetensors", "nt3/x@1", "--tag", "best", "--metric", "acc=0.5")[0] == 0
    )
    assert "saved nt3/y@1: 7 tensors" in sapwood("put", "a.pt", "nt3/y")[1]
    for name, out in (("nt3/x@best", "out.safetensors"), ("nt3/y", "out.pt")):
        code, text, _ = sapwood("get", name, out)
        assert code == 0
        assert f"wrote {out}" in text
    found = safetensors.torch.load_file("out.safetensors")
    assert {k: v.tolist() for k, v in found.items()} == {
        k: v.tolist() for k, v in model.state_dict().items()
    }
    model.load_state_dict(torch.load("out.pt", weights_only=True))
    assert sapwood("get", "nt3/x", "out.pt")[0] == 1


def test_what_is_there_is_listed(sapwood: Sapwood, model: nn.Module) -> None:
    sapwood("put", "a.pt", "nt3/x@1", "--tag", "best", "--metric", "acc=0.5")
    sapwood("put", "a.pt", "other")
    listed = sapwood("ls")[1]
    assert "nt3/x@1" in listed
    assert "acc=0.5" in listed
    found = json.loads(sapwood("ls", "nt3/*", "--json")[1])
    assert [(one["name"], one["version"], one["tags"]) for one in found] == [
        ("nt3/x", "1", ["best"])
    ]
    shown = sapwood("show", "nt3/x")[1]
    assert "0.weight" in shown
    assert "4 x 4" in shown
    assert json.loads(sapwood("show", "nt3/x", "--json")[1])["tensor"][0]["bytes"] == 64


def test_history_and_differences(sapwood: Sapwood, model: nn.Sequential) -> None:
    sapwood("put", "a.pt", "nt3/x@1")
    with torch.no_grad():
        model[0].bias += 1
    torch.save(model.state_dict(), "b.pt")
    sapwood("put", "b.pt", "nt3/x@2", "--parent", "nt3/x@1")
    code, text, _ = sapwood("diff", "nt3/x@1", "nt3/x@2")
    assert code == 1
    assert "0.bias" in text
    assert "6 of 7 tensors are the same" in text
    assert sapwood("diff", "nt3/x@1", "nt3/x@1")[0] == 0
    assert json.loads(sapwood("diff", "nt3/x@1", "nt3/x@2", "--json")[1])[0]["name"] == "0.bias"
    assert [line.split()[0] for line in sapwood("log", "nt3/x")[1].splitlines()] == [
        "nt3/x@2",
        "nt3/x@1",
    ]


def test_removing_says_first_what_would_go(sapwood: Sapwood, model: nn.Module) -> None:
    sapwood("put", "a.pt", "a@1")
    sapwood("put", "a.pt", "b@1")
    assert "would remove a@1" in sapwood("rm", "a@1")[1]
    assert sapwood("show", "a@1")[0] == 0
    assert "removed a@1" in sapwood("rm", "a@1", "--yes")[1]
    code, _, text = sapwood("show", "a@1")
    assert code == 1
    assert "no model 'a'" in text
    assert "in use" in sapwood("gc")[1]
    assert "all sound" in sapwood("verify")[1]


def test_tags_move(sapwood: Sapwood, model: nn.Module) -> None:
    sapwood("put", "a.pt", "a@1")
    assert "best is a@1 now" in sapwood("tag", "a@1", "best")[1]
    assert sapwood("untag", "a@best")[0] == 0
    assert "no tag 'best'" in sapwood("untag", "a@best")[2]


def test_damage_ends_with_one(sapwood: Sapwood, model: nn.Module, tmp_path: Path) -> None:
    sapwood("put", "a.pt", "a@1")
    assert sapwood("verify")[0] == 0
    (pack,) = [path for path in (tmp_path / "models/packs").rglob("*") if path.is_file()]
    pack.write_bytes(bytes(len(pack.read_bytes())))
    code, text, _ = sapwood("verify")
    assert code == 1
    assert "a@1 0.weight" in text


def test_a_folder_of_hugging_face_is_read(
    sapwood: Sapwood, model: nn.Module, tmp_path: Path
) -> None:
    state = model.state_dict()
    (tmp_path / "hf").mkdir()
    parts = {"one.safetensors": list(state)[:3], "two.safetensors": list(state)[3:]}
    for file, names in parts.items():
        safetensors.torch.save_file({n: state[n] for n in names}, tmp_path / "hf" / file)
    index = {"weight_map": {n: file for file, names in parts.items() for n in names}}
    (tmp_path / "hf/model.safetensors.index.json").write_text(json.dumps(index))
    assert "7 tensors" in sapwood("put", "hf", "hf@1")[1]
    index["weight_map"]["0.bias"] = "../a.safetensors"
    (tmp_path / "hf/model.safetensors.index.json").write_text(json.dumps(index))
    assert "not a file of this folder" in sapwood("put", "hf", "hf@2")[2]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["ls"], "there is no repository in"),
        (["put", "nothing.pt", "a@1"], "there is no nothing.pt"),
        (["put", "a.txt", "a@1"], "expected a file that ends in"),
        (["put", "a.pt", "../a"], "is no name of a model"),
        (["put", "a.pt", "a@1", "--metric", "acc"], "expected a name and a number"),
        (["put", "a.pt", "a@1", "--parent", "b"], "there is no model 'b'"),
        (["put", "bad.pt", "a@1"], "without running code"),
        (["put", "bad.safetensors", "a@1"], "not a sound .safetensors file"),
        (["put", "empty", "a@1"], "holds no .safetensors files"),
        (["rm"], "say which versions"),
        (["rm", "a"], "names no version"),
        (["untag", "a"], "expected name@tag"),
        (["get", "a", "out.zip"], "there is no repository"),
    ],
)
def test_wrong_input_is_one_line(
    words: list[str], said: str, sapwood: Sapwood, model: nn.Module, tmp_path: Path
) -> None:
    (tmp_path / "a.txt").write_text("x")
    (tmp_path / "empty").mkdir()
    (tmp_path / "bad.pt").write_bytes(b"\x80\x04junk")
    (tmp_path / "bad.safetensors").write_bytes(b"\xff" * 40)
    code, _, text = sapwood(*words)
    assert code == 1
    assert said in text
    assert "Traceback" not in text


def test_the_place_can_be_named(
    sapwood: Sapwood, model: nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sapwood("put", "a.pt", "a@1", "--at", "elsewhere")
    assert "a@1" in sapwood("ls", "--at", "elsewhere")[1]
    monkeypatch.setenv("SAPWOOD_STORE", str(tmp_path / "elsewhere"))
    assert "a@1" in sapwood("ls")[1]


def test_versions_are_found(sapwood: Sapwood, model: nn.Module) -> None:
    sapwood("put", "a.pt", "nt3/x@1", "--metric", "acc=0.5", "--tag", "best")
    sapwood("put", "a.pt", "nt3/x@2", "--metric", "acc=0.75")
    sapwood("put", "a.pt", "other@1")
    code, text, _ = sapwood("find", "acc > 0.4 and not tag = best")
    assert code == 0
    assert "nt3/x@2" in text
    assert "nt3/x@1" not in text
    found = json.loads(sapwood("find", "has acc", "--by", "acc", "--json")[1])
    assert [one["version"] for one in found] == ["2", "1"]
    assert sapwood("find", "acc > 1")[0] == 1
    code, _, text = sapwood("find", "ac > 1")
    assert code == 1
    assert "did you mean 'acc'" in text


def test_a_folder_goes_out_as_it_came(sapwood: Sapwood, model: nn.Module, tmp_path: Path) -> None:
    (tmp_path / "hf").mkdir()
    weights = tmp_path / "hf/model.safetensors"
    safetensors.torch.save_file(model.state_dict(), weights, {"format": "pt"})
    (tmp_path / "hf/config.json").write_text("{}")
    (tmp_path / "hf/huge.gguf").write_text("weights in another form")
    assert "7 tensors and 1 files" in sapwood("put", "hf", "hf@1", "--without", "*.gguf")[1]
    assert "files: config.json" in sapwood("show", "hf")[1]
    assert json.loads(sapwood("show", "hf", "--json")[1])["files"] == {"config.json": 2}
    assert sapwood("get", "hf", "out")[0] == 0
    assert (tmp_path / "out/model.safetensors").read_bytes() == weights.read_bytes()
    assert (tmp_path / "out/config.json").read_text() == "{}"
    assert sapwood("get", "hf", "split", "--shard-size", "80B")[0] == 0
    assert len(list((tmp_path / "split").glob("*.safetensors"))) > 1
    assert "is no size" in sapwood("get", "hf", "x", "--shard-size", "much")[2]


def test_serving_says_what_is_missing(
    sapwood: Sapwood, model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("starlette", reason="pip install 'sapwood[web]'")
    sapwood("put", "a.pt", "a@1")
    assert "expected host:port" in sapwood("hub", "--listen", "here")[2]
    assert "cannot read the token" in sapwood("hub", "--token-file", "nothing")[2]
    for loaded in [name for name in sys.modules if name.startswith("sapwood.integrations.hub")]:
        monkeypatch.delitem(sys.modules, loaded)
    monkeypatch.setitem(sys.modules, "starlette.applications", None)
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    assert "pip install 'sapwood[web]'" in sapwood("hub")[2]
