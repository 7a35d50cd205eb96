"""The server: how it starts, what it refuses, and that it ends with all it began."""

from __future__ import annotations

import builtins
import socket
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from sapwood.errors import ConfigError, SapwoodError
from sapwood.report.store import Serving
from sapwood.report.store.jobs import Cancelled, Job, Jobs, Kept
from sapwood.runtime.tokens import read_or_make_token as read_token
from sapwood.store import Repository
from sapwood.store.stored import StoredModel

LARGE = 40_000_000


def test_a_port_that_is_taken_is_named(repo: Repository, serving: Serving) -> None:
    with pytest.raises(ConfigError, match=f"cannot listen on port {serving.port}"):
        Serving(repo, place="models", port=serving.port)
    for port in (-1, 65536):
        with pytest.raises(ConfigError, match="expected 0"):
            Serving(repo, place="models", port=port)


def test_missing_packages_are_named(repo: Repository, monkeypatch: pytest.MonkeyPatch) -> None:
    importing = builtins.__import__

    def without(name: str, *more: Any, **named: Any) -> Any:
        if name == "uvicorn":
            raise ModuleNotFoundError(f"no {name}", name=name)
        return importing(name, *more, **named)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ConfigError, match=r"sapwood\[web\]"):
        Serving(repo, place="models")


def test_closing_ends_every_thread_and_leaves_the_repository(family: Repository) -> None:
    with Serving(family, place="models") as serving:
        url = serving.url
        assert httpx.get(f"{url}api/versions", trust_env=False).json()["total"] == 4
        assert httpx.get(f"{url}api/histogram?ref=a@1", trust_env=False).json()["count"] == 288
    serving.close()
    assert not [one.name for one in threading.enumerate() if "sapwood" in one.name]
    assert serving.wait(0)
    with pytest.raises(httpx.ConnectError):
        httpx.get(url, trust_env=False)
    assert len(family.models()) == 4


def test_closing_does_not_wait_for_who_reads_slowly(
    repo: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    _slowly(monkeypatch)
    repo.save({"t": torch.zeros(LARGE // 4)}, "m@1")
    repo.save({"t": torch.ones(LARGE // 4)}, "m@2")
    serving = Serving(repo, place="models")
    asking = "GET /api/compare?before=m@1&after=m@2 HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with socket.create_connection(("127.0.0.1", serving.port), timeout=10) as sock:
        sock.sendall(asking.encode())
        assert sock.recv(100).startswith(b"HTTP/1.1 200")
        serving.close()
    assert serving.wait(0)


def _slowly(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Blocks take a while; how many were read."""
    blocks = StoredModel.blocks
    read: list[int] = []

    def slow(self: StoredModel, row: Any) -> Any:
        for block in blocks(self, row):
            read.append(len(block))
            time.sleep(0.2)
            yield block

    monkeypatch.setattr(StoredModel, "blocks", slow)
    return read


@pytest.mark.parametrize("path", ["histogram?ref=m@1", "compare?before=m@1&after=m@2"])
def test_who_leaves_ends_the_work(
    path: str, repo: Repository, serving: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = _slowly(monkeypatch)
    repo.save({"t": torch.zeros(LARGE // 4)}, "m@1")
    repo.save({"t": torch.ones(LARGE // 4)}, "m@2")
    with socket.create_connection(("127.0.0.1", serving.port), timeout=10) as sock:
        sock.sendall(f"GET /api/{path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        _until(lambda: len(read) > 0)
    _until(lambda: _still(read))
    assert sum(read) < 2 * LARGE  # which both read in all


def _until(fits: Any) -> None:
    deadline = time.monotonic() + 20
    while not fits():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def _still(read: list[int]) -> bool:
    before = len(read)
    time.sleep(0.5)
    return len(read) == before


def test_large_tensors_are_read_in_blocks(
    repo: Repository, client: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    repo.save({"t": torch.arange(LARGE // 4, dtype=torch.float32)}, "m@1")
    repo.save({"t": torch.zeros(LARGE // 4)}, "m@2")
    repo.flush()
    sizes: list[int] = []
    backend = repo._backend
    read = backend.read

    def noting(parts: Any) -> None:
        sizes.append(sum(len(part.out) for part in parts))
        read(parts)

    def never(*_: Any) -> None:
        raise AssertionError("mapped whole")

    monkeypatch.setattr(backend, "read", noting)
    monkeypatch.setattr(backend, "mapped", never)
    found = client.get("/api/histogram", params={"ref": "m@1"}).json()
    assert found["count"] == LARGE // 4
    assert sum(sizes) == 2 * LARGE
    assert client.get("/api/compare", params={"before": "m@1", "after": "m@2"}).status_code == 200
    assert sum(sizes) == 4 * LARGE
    assert max(sizes) <= 4 * 2**20


def test_jobs_are_few_and_end() -> None:
    jobs = Jobs()
    go = threading.Event()

    def work(job: Job[int]) -> int:
        while not go.wait(0.01):
            job.advance(0, 1, "")
        return 7

    begun = [jobs.start(work) for _ in range(16)]
    with pytest.raises(SapwoodError, match="too much"):
        jobs.start(work)
    begun[0].cancel()
    begun[15].cancel()
    _until(lambda: begun[0].future.done())
    for job in (begun[0], begun[15]):
        with pytest.raises(Cancelled):
            job.result()
    go.set()
    assert begun[1].future.result(timeout=10) == 7
    jobs.close()
    jobs.close()
    with pytest.raises(SapwoodError, match="closed"):
        jobs.start(work)


def test_the_results_asked_for_last_are_kept() -> None:
    kept: Kept[int] = Kept(2)
    kept.keep("a", 1)
    kept.keep("b", 2)
    assert kept.get("a") == 1
    kept.keep("c", 3)
    assert (kept.get("a"), kept.get("b"), kept.get("c")) == (1, None, 3)


def test_a_token_is_made_for_its_owner_only(tmp_path: Path) -> None:
    file = tmp_path / "token"
    token, made = read_token(file)
    assert made
    assert len(token) >= 32
    assert file.stat().st_mode & 0o777 == 0o600
    assert read_token(file) == (token, False)


@pytest.mark.parametrize(
    "content", ["", "short", "a token with blanks in it", "é" * 20, "x\n" * 20]
)
def test_a_file_without_a_token_is_refused(content: str, tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text(content)
    file.chmod(0o600)
    with pytest.raises(ConfigError, match="holds no token"):
        read_token(file)


def test_a_token_that_others_can_read_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "token"
    read_token(file)
    file.chmod(0o640)
    with pytest.raises(ConfigError, match="chmod 600"):
        read_token(file)
    with pytest.raises(ConfigError, match="cannot read"):
        read_token(tmp_path / "none" / "token")
    folder = tmp_path / "folder"
    folder.mkdir(mode=0o700)
    with pytest.raises(ConfigError, match="a folder"):
        read_token(folder)
