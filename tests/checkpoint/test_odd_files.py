"""FIFOs and devices in the place of files: named, passed over, and never waited for."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

import sapwood
from sapwood.checkpoint.engine.launch import _last_words, _open
from sapwood.errors import CheckpointError, TierError
from sapwood.integrations.dcp import SapwoodReader, SapwoodWriter
from sapwood.regular import open_regular, read_regular
from sapwood.storage.files import Files
from sapwood.tiers.base import Recorded, Stored, Tier
from sapwood.tiers.spec import TierSpec
from tests.checkpoint import engines
from tests.checkpoint.training import Training, same
from tests.cli.checkpoints import told
from tests.odd import ODD, SAID, Odd, fifo, no_waiting
from tests.tiers.crash import KINDS, NEW, OLD, put_all, tier_in
from tests.tiers.nodes import cluster
from tests.tiers.shards import shard

pytestmark = pytest.mark.usefixtures(no_waiting.__name__)


def open_all(tier: Tier) -> None:
    for stored in tier.shards():
        tier.open(stored).close()


@ODD
@pytest.mark.parametrize("kind", sorted(KINDS))
def test_every_file_of_a_shard(kind: str, odd: Odd, tmp_path: Path) -> None:
    put_all(tier_in(kind, tmp_path / "0"), OLD)
    names = sorted(
        p.relative_to(tmp_path / "0") for p in (tmp_path / "0").rglob("*") if p.is_file()
    )
    for number, name in enumerate(names, start=1):
        folder = tmp_path / str(number)
        tier = tier_in(kind, folder)
        put_all(tier, OLD)
        odd(folder / name)
        if name.name == "manifest.json":  # nobody needs it to restore
            with pytest.raises(CheckpointError, match=SAID):
                tier.check(OLD)  # type: ignore[attr-defined]
            continue
        assert len(tier.shards()) == 2
        with pytest.raises(CheckpointError, match=SAID):
            open_all(tier)


@ODD
@pytest.mark.parametrize("kind", ["external", "local"])
def test_a_record_that_is_read_by_itself(kind: str, odd: Odd, tmp_path: Path) -> None:
    tier = tier_in(kind, tmp_path)
    assert isinstance(tier, Recorded)
    put_all(tier, OLD)
    (path,) = tmp_path.rglob("shard-0.json")
    odd(path)
    with pytest.raises(CheckpointError, match=SAID):
        tier.record(Stored(OLD, 0))


@ODD
def test_what_is_written_to_must_be_a_file_too(odd: Odd, tmp_path: Path) -> None:
    tier = tier_in("external", tmp_path)
    tier.put(*shard(NEW.step, 0, 2))
    odd(tmp_path / f"{NEW}.partial" / "model.safetensors")
    with pytest.raises(TierError, match=SAID):
        tier.put(*shard(NEW.step, 1, 2))
    with pytest.raises(OSError, match=SAID):
        Files().create(tmp_path / f"{NEW}.partial" / "model.safetensors")


@ODD
@pytest.mark.parametrize("suffix", ["json", "bin"])
def test_what_a_node_keeps_for_others(odd: Odd, suffix: str, tmp_path: Path) -> None:
    with cluster(tmp_path, 2) as nodes:
        tier = nodes.partner("a")
        tier.put(*shard(1, 0, 2))
        (kept,) = tmp_path.rglob(f"shard-0.{suffix}")
        odd(kept)
        with pytest.raises(CheckpointError, match=SAID):
            tier.open(Stored(shard(1, 0, 2)[0].id, 0))


@ODD
@pytest.mark.parametrize("name", ["shard-0.json", "model.safetensors"])
def test_a_restore_takes_the_one_before(odd: Odd, name: str, tmp_path: Path) -> None:
    training, place = Training(tmp_path), tmp_path / "ckpts"
    tiers = [TierSpec(kind="external")]
    states = {}
    with sapwood.Checkpointer(training.run, place, tiers=tiers, engine="sync") as c:
        for step in (1, 2):
            training.steps(step)
            c.save()
            states[step] = training.state()
    training.close()
    (newest,) = place.glob("00000002-*")
    odd(newest / name)
    again = Training(tmp_path)
    with sapwood.Checkpointer(again.run, place, tiers=tiers, engine="sync") as c:
        restored = c.restore_latest()
        assert restored is not None
        assert restored.step == 1
        assert "expected a regular file" in " ".join(restored.skipped)
    assert same(again.state(), states[1])
    again.close()


def test_the_command_line_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    put_all(tier_in("external", Path("ckpts")), OLD)
    fifo(Path("ckpts", str(OLD), "model.safetensors"))
    assert "is a FIFO" in told(capsys, "verify", code=1)
    assert "is a FIFO" in told(capsys, "ls")
    assert "is a FIFO" in told(capsys, "repair", code=1)


@ODD
@pytest.mark.parametrize("name", ["manifest.json", "rank-0.bin"])
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_save_of_dcp(odd: Odd, name: str) -> None:
    dcp.save({"w": torch.ones(3)}, storage_writer=SapwoodWriter("ckpts"))
    dcp.save({"w": torch.zeros(3)}, storage_writer=SapwoodWriter("ckpts"))
    odd(Path("ckpts/dcp-00000002", name))
    found = {"w": torch.full((3,), 7.0)}
    dcp.load(found, storage_reader=SapwoodReader("ckpts"))
    assert found["w"].eq(1).all()


def test_an_engines_token_and_log(tmp_path: Path) -> None:
    where = engines.address(tmp_path / "ckpts")
    where.write_token("token")
    assert where.read_token() == "token"
    fifo(where.token_file)
    assert where.read_token() is None
    log = tmp_path / "engine.log"
    os.mkfifo(log)
    fd = _open(log)
    assert Path(f"/proc/self/fd/{fd}").readlink() == Path("/dev/null")
    os.close(fd)
    assert _last_words(log) == ""


def test_regular_files_and_links_to_them_are_read(tmp_path: Path) -> None:
    path, link = tmp_path / "file", tmp_path / "link"
    path.write_bytes(b"content")
    link.symlink_to(path)
    assert read_regular(path) == read_regular(link) == b"content"
    with pytest.raises(FileNotFoundError):
        open_regular(tmp_path / "none")
    with pytest.raises(OSError, match="is a folder, expected a regular file"):
        open_regular(tmp_path)
