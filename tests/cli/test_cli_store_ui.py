"""``sapwood store ui`` as a process: it says where it is, and ends when it is told to."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
import torch

import sapwood.store
from sapwood.cli.main import main


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    with sapwood.store.open(tmp_path / "models") as repo:
        repo.save({"x": torch.ones(2)}, "m@1", tags=["t"])
    started = []

    def call(*words: str) -> subprocess.Popen[str]:
        environment = {k: v for k, v in os.environ.items() if k not in ("DISPLAY", "BROWSER")}
        command = [sys.executable, "-m", "sapwood.cli", "store", "ui", "--at", "models", *words]
        started.append(
            subprocess.Popen(
                command, cwd=tmp_path, text=True, stdout=subprocess.PIPE, env=environment
            )
        )
        return started[-1]

    yield call
    for process in started:
        process.kill()
        process.communicate(timeout=20)


def test_it_serves_until_it_is_told_to_end(
    start: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    other = start()
    process = start("--no-browser", "--token-file", "token")
    assert process.stdout is not None
    assert other.stdout is not None
    assert process.stdout.readline() == "made a token in token\n"
    said = process.stdout.readline()
    found = re.fullmatch(r"models: (http://127\.0\.0\.1:\d+/) \(changes need .* ends it\)\n", said)
    assert found is not None, said
    headers = {"authorization": f"Bearer {(tmp_path / 'token').read_text().strip()}"}
    with httpx.Client(base_url=found[1], trust_env=False, timeout=20) as client:
        assert client.get("/api/versions").json()["rows"][0]["ref"] == "m@1"
        body = {"name": "m", "tag": "t"}
        assert client.post("/api/untag", json=body, headers=headers).status_code == 200
        process.send_signal(signal.SIGINT)  # while the connection is open
        assert process.wait(timeout=30) == 0
    assert "read-only; Ctrl-C ends it" in other.stdout.readline()
    other.send_signal(signal.SIGTERM)
    assert other.wait(timeout=30) == 0


def test_what_is_wrong_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["store", "ui", "--at", "none"]) == 1
    assert "there is no repository" in capsys.readouterr().err
    sapwood.store.open(tmp_path / "models").close()
    (tmp_path / "token").write_text("short")
    assert main(["store", "ui", "--token-file", "token"]) == 1
    assert "chmod 600" in capsys.readouterr().err
    assert main(["store", "ui", "--port", "70000"]) == 1
    assert "expected 0 (any) to 65535" in capsys.readouterr().err
