"""FIFOs and devices where a run, trace, fork or data set has a file: named, never waited for."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import sapwood
from sapwood import trace
from sapwood.cli.folders import read_run
from sapwood.clone.address import Address
from sapwood.data import convert
from sapwood.errors import CloneError, ConfigError, SapwoodError, StoreError, TraceError
from sapwood.store.exchange import read_model
from sapwood.trace.read import read_trace
from tests.data import sources
from tests.odd import ODD, SAID, Odd, no_waiting

pytestmark = pytest.mark.usefixtures(no_waiting.__name__)


@ODD
@pytest.mark.parametrize("name", ["run.toml", "status.json"])
def test_a_run_s_folder_is_damaged(odd: Odd, name: str, tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    with sapwood.Run(model, torch.optim.SGD(model.parameters(), lr=0.1), folder=tmp_path) as run:
        folder = run.folder
    assert read_run(folder).state != "damaged"
    odd(folder / name)
    found = read_run(folder)
    assert found.state == "damaged"
    assert "expected a regular file" in found.detail


@ODD
def test_a_trace(odd: Odd, tmp_path: Path) -> None:
    path = tmp_path / "rank-0.jsonl"
    odd(path)
    with pytest.raises(TraceError, match=SAID):
        trace.open_trace(path, rank=0, world=1, run_id="r")
    with pytest.raises(TraceError, match=SAID):
        read_trace(tmp_path)


@ODD
@pytest.mark.parametrize("name", ["address", "token"])
def test_what_a_fork_begins_with(odd: Odd, name: str, tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    with sapwood.Run(model, torch.optim.SGD(model.parameters(), lr=0.1), folder=tmp_path) as run:
        run.allow_clones()
        assert Address.read(run.folder).token()
        odd(run.folder / name)
        with pytest.raises(CloneError, match=SAID):
            Address.read(run.folder).token()


@ODD
def test_data_to_convert(odd: Odd, tmp_path: Path) -> None:
    sources.images(tmp_path / "in", {"cat": 2})
    odd(tmp_path / "in" / "cat" / "another.png")
    with pytest.raises(SapwoodError, match=SAID):
        convert(tmp_path / "in", tmp_path / "a.mdb")
    for name in ("a.safetensors", "a.npy", "a.tar", "a.tar.gz", "tars/a.tar"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        odd(tmp_path / name)
        with pytest.raises(SapwoodError, match=rf"{name}.*{SAID}"):
            convert(tmp_path / name.partition("/")[0], tmp_path / "b.mdb")
    assert not list(tmp_path.glob("*.mdb"))


@ODD
@pytest.mark.parametrize("name", ["m.pt", "m.bin", "m.safetensors", "whole/m.safetensors"])
def test_a_model_for_the_store(odd: Odd, name: str, tmp_path: Path) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    odd(tmp_path / name)
    with pytest.raises(StoreError, match=SAID):
        read_model(tmp_path / name.partition("/")[0])


@ODD
def test_settings(odd: Odd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SAPWOOD_CONFIG", raising=False)
    model = torch.nn.Linear(2, 2)
    odd(Path("sapwood.toml"))  # tests run in their own folder
    with pytest.raises(ConfigError, match=r"sapwood\.toml is not a file"):
        sapwood.Run(model, torch.optim.SGD(model.parameters(), lr=0.1), folder=tmp_path)
    monkeypatch.setenv("SAPWOOD_CONFIG", "sapwood.toml")
    with pytest.raises(ConfigError, match=r"names sapwood\.toml, which is not a file"):
        sapwood.Run(model, torch.optim.SGD(model.parameters(), lr=0.1), folder=tmp_path)
