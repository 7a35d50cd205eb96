"""Files called .json are JSON, in every tier; and those of earlier versions are still read."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp

import sapwood
from sapwood.errors import CheckpointError
from sapwood.integrations.dcp import SapwoodReader, SapwoodWriter
from sapwood.tiers.base import Stored
from sapwood.tiers.digest import digest, seal, seal_json, unseal
from sapwood.tiers.external import ExternalTier
from sapwood.tiers.fragments import FragmentRecord
from sapwood.tiers.manifest import MANIFEST, Manifest
from sapwood.tiers.metrics import metrics_of, plain_metrics
from sapwood.tiers.record import CheckpointId
from tests.checkpoint.training import Training
from tests.cli.checkpoints import ask, told
from tests.tiers.contract import read_all
from tests.tiers.crash import KINDS, OLD, check, put_all, ranks_of, tier_in
from tests.tiers.nodes import cluster
from tests.tiers.shards import ATTEMPT, shard


def strictly(path: Path) -> object:
    def refuse(word: str) -> object:
        raise AssertionError(f"{path} says {word}, which is not JSON")

    return json.loads(path.read_bytes(), parse_constant=refuse)


def check_all(folder: Path) -> int:
    found = list(folder.rglob("*.json"))
    for path in found:
        assert isinstance(strictly(path), dict)
    return len(found)


def with_a_line(path: Path) -> None:
    """As earlier versions wrote it: the checksum in a line behind the JSON."""
    path.write_bytes(seal(unseal(path.read_bytes(), str(path))))
    with pytest.raises(json.JSONDecodeError):
        strictly(path)


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_tiers_of_files(kind: str, tmp_path: Path) -> None:
    tier = tier_in(kind, tmp_path)
    put_all(tier, OLD)
    assert check_all(tmp_path) == 2 + (kind == "external")
    for path in tmp_path.rglob("*.json"):
        if path.name != MANIFEST:
            with_a_line(path)
    if kind == "external":
        with pytest.raises(CheckpointError, match="not the one its manifest was made of"):
            tier.check(OLD)  # type: ignore[attr-defined]
        tier.write_manifest(OLD)  # type: ignore[attr-defined]
        with_a_line(tmp_path / OLD.folder / MANIFEST)
    check(tier, ranks_of(OLD))


@pytest.mark.parametrize("scheme", ["partner", "2+1"])
def test_what_nodes_keep_for_each_other(scheme: str, tmp_path: Path) -> None:
    with cluster(tmp_path, 3) as nodes:
        tier = nodes.partner("a") if scheme == "partner" else nodes.parity("a", scheme)
        record, memory = shard(1, 0, 3)
        tier.put(record, memory)
        assert check_all(tmp_path) == (1 if scheme == "partner" else 3)
        assert np.array_equal(read_all(tier, Stored(record.id, 0)), memory)


def test_fragments_of_earlier_versions_are_read() -> None:
    shard_record = shard(1, 0, 3)[0].encode()
    record = FragmentRecord(code="xor", block=64, nbytes=100, index=1, digests=("ab", "cd"))
    content = record.encode(shard_record)
    assert FragmentRecord.decode(content, "a fragment") == (record, shard_record)
    body = json.loads(unseal(content, "a fragment"))
    del body["shard"]
    line = json.dumps(body, separators=(",", ":")).encode()
    mark = f"{record.algorithm}:{digest(line, record.algorithm)}".encode()
    earlier = b"\n".join((line, mark, shard_record))
    assert FragmentRecord.decode(earlier, "a fragment") == (record, shard_record)
    for bad in (content, earlier):
        with pytest.raises(CheckpointError, match="damaged"):
            FragmentRecord.decode(bad[:20] + bytes([bad[20] ^ 1]) + bad[21:], "a fragment")


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_saves_of_dcp() -> None:
    dcp.save({"w": torch.ones(3), "n": 1}, storage_writer=SapwoodWriter("ckpts"))
    assert check_all(Path("ckpts")) == 1
    with_a_line(next(Path("ckpts").rglob("manifest.json")))
    found = {"w": torch.zeros(3), "n": 0}
    dcp.load(found, storage_reader=SapwoodReader("ckpts"))
    assert found["w"].eq(1).all()


def test_metrics_that_are_no_numbers_of_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    training = Training(tmp_path)
    with sapwood.Checkpointer(training.run, "ckpts", engine="sync", keep=1) as c:
        training.steps(1)
        c.save(metrics={"loss": float("nan"), "best": float("inf"), "size": np.float32(2)})
    training.close()
    assert check_all(Path("ckpts")) == 2
    (row,) = ask(capsys, "ls")
    assert row["metrics"] == {"loss": "nan", "best": "inf", "size": 2.0}
    assert "loss=nan" in told(capsys, "ls")
    assert metrics_of({"metrics": {"a": "-inf", "b": 1}}) == {"a": float("-inf"), "b": 1.0}
    with pytest.raises(CheckpointError, match=r"metrics\['loss'\] is 'low', expected a number"):
        plain_metrics({"loss": "low"})


@pytest.mark.parametrize("make", [seal, seal_json])
@pytest.mark.parametrize("indent", [None, 1])
def test_a_changed_byte_is_noticed(make: Callable[[bytes], bytes], indent: int | None) -> None:
    body = {"format": "x/1", "files": {"a": 1}, "records": ["aa", "bb"]}
    content = make(json.dumps(body, indent=indent).encode())
    assert json.loads(unseal(content, "it")) == body
    for at in range(len(content)):
        for bit in range(8):
            changed = bytearray(content)
            changed[at] ^= 1 << bit
            with pytest.raises(CheckpointError, match=r"it is damaged|not available"):
                unseal(bytes(changed), "it")
    for length in range(len(content)):
        with pytest.raises(CheckpointError):
            unseal(content[:length], "it")


def test_manifests_are_the_same_wherever_they_are_written(tmp_path: Path) -> None:
    tier = ExternalTier(tmp_path)
    for rank in (0, 1):
        tier.put(*shard(4, rank, 2))
    id = CheckpointId(4, ATTEMPT)
    content = (tmp_path / id.folder / MANIFEST).read_bytes()
    assert Manifest.decode(content, "it").encode() == content
