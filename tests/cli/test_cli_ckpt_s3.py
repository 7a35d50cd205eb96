"""``sapwood ckpt`` on a bucket of a real server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from sapwood.cli.main import main
from sapwood.storage.s3 import objects
from sapwood.testing import faults, seaweed
from sapwood.tiers import s3
from sapwood.tiers.local import LocalTier
from sapwood.tiers.record import CheckpointId
from tests.tiers.shards import ATTEMPT, shard

WORLD = 2
BUCKET = "ckpts"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with seaweed.serve(tmp_path_factory.mktemp("seaweed")) as running:
        running.make_bucket(BUCKET)
        yield running


@pytest.fixture
def place(server: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    return f"s3://{BUCKET}/{tmp_path.name}"


def save(tier: Any, *steps: int, ranks: Any = range(WORLD)) -> None:
    for step in steps:
        for rank in ranks:
            tier.put(*shard(step, rank, WORLD))


def ask(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    assert main(["ckpt", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_a_bucket_is_listed_verified_compared_exported_and_pruned(place, capsys):
    assert main(["ckpt", "ls", place]) == 1
    assert f"no checkpoints in {place}" in capsys.readouterr().err
    save(s3.S3Tier(place), 5, 10)
    assert [row["state"] for row in ask(capsys, "ls", place)] == ["whole", "whole"]
    assert ask(capsys, "verify", "--place", place)["damages"] == []
    assert ask(capsys, "inspect", f"{place}/latest")["id"] == CheckpointId(10, ATTEMPT).folder
    assert main(["ckpt", "diff", f"{place}/5", f"{place}/10"]) == 1
    assert main(["ckpt", "export", f"{place}/5", "model.safetensors"]) == 0
    with safe_open("model.safetensors", "pt") as found:
        assert found.get_tensor("half").dtype == torch.bfloat16
    assert main(["ckpt", "prune", place, "--last", "1", "--yes"]) == 0
    capsys.readouterr()
    assert [row["step"] for row in ask(capsys, "ls", place)] == [10]


def test_shards_go_from_a_nodes_folder_to_a_bucket_and_back(place, capsys):
    save(LocalTier(Path("scratch/n0")), 5, 10)
    save(s3.S3Tier(place), 10, ranks=[0])
    assert main(["ckpt", "repair", place, "--from", "scratch", "--yes"]) == 0
    capsys.readouterr()
    (row,) = ask(capsys, "ls", place)
    assert row["state"] == "whole"
    LocalTier(Path("scratch/n0")).drop(CheckpointId(10, ATTEMPT))
    assert main(["ckpt", "repair", "scratch", "--from", place, "--yes"]) == 0
    assert main(["ckpt", "diff", "scratch/10", f"{place}/10"]) == 0


def test_a_damaged_file_is_mended_from_another_place(place, capsys):
    save(LocalTier(Path("scratch/n0")), 5)
    tier = s3.S3Tier(place)
    save(tier, 5)
    store, name = objects.Objects(tier.place), f"{CheckpointId(5, ATTEMPT)}/model.safetensors"
    content = bytearray(store.get(name))
    content[-9] ^= 1
    store.put(name, bytes(content))
    assert main(["ckpt", "verify", "--place", place]) == 1
    assert main(["ckpt", "repair", place, "--yes"]) == 1  # no other copy is known
    assert main(["ckpt", "repair", place, "--from", "scratch", "--yes"]) == 0
    assert main(["ckpt", "verify", "--place", place]) == 0
    assert not [n for n in store.names() if n.endswith(".bin")]


def test_a_manifest_that_was_removed_is_made_anew(place, capsys):
    tier = s3.S3Tier(place)
    save(tier, 5)
    name = f"{CheckpointId(5, ATTEMPT)}/manifest.json"
    objects.Objects(tier.place).delete([name])
    assert [row["state"] for row in ask(capsys, "ls", place)] == ["whole"]
    assert main(["ckpt", "verify", "--place", place]) == 1
    assert f"{name} is missing" in capsys.readouterr().out
    assert main(["ckpt", "repair", place, "--yes"]) == 0
    assert main(["ckpt", "verify", "--place", place]) == 0


def test_files_that_were_never_made_are_found_and_made(place, capsys):
    tier = s3.S3Tier(place)
    with (
        faults.inject("s3", "raise", when=lambda object, **_: object.endswith("claim.json")),
        pytest.raises(faults.InjectedError),
    ):
        save(tier, 5)
    assert main(["ckpt", "verify", "--place", place]) == 1
    assert main(["ckpt", "repair", place, "--yes"]) == 0
    assert main(["ckpt", "verify", "--place", place]) == 0
