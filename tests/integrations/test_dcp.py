"""torch DCP on our storage: same API, and none of the ways in which it silently goes wrong."""

from __future__ import annotations

import errno
import io
import json
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from sapwood.errors import ConfigError
from sapwood.integrations.dcp import SapwoodReader, SapwoodWriter
from sapwood.integrations.dcp.manifest import Manifest
from sapwood.testing import faults
from sapwood.tiers.digest import digest, seal, unseal

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def state(value: float) -> dict[str, Any]:
    """Tensors of several kinds and plain values, all telling which save they are of."""
    return {
        "weight": torch.full((300, 7), value),
        "half": torch.full((5,), value, dtype=torch.bfloat16),
        "scalar": torch.tensor(value, dtype=torch.float64),
        "empty": torch.empty(0, 3),
        "swapped": torch.full((4, 6), value).t(),
        "nested": {"flags": torch.tensor([True, False]), "lr": value, "betas": (0.9, value)},
    }


def blank() -> dict[str, Any]:
    return state(-1.0)


def is_state(found: dict[str, Any], value: float) -> bool:
    """Whether it is all of one save."""
    wanted = state(value)
    nested, others = found["nested"], wanted["nested"]
    tensors = all(
        torch.equal(v, found[k]) and v.dtype == found[k].dtype
        for k, v in wanted.items()
        if isinstance(v, Tensor)
    )
    return tensors and nested["lr"] == others["lr"] and nested["betas"] == others["betas"]


def save(value: float, place: str = "ckpts", **options: Any) -> None:
    dcp.save(state(value), storage_writer=SapwoodWriter(place, **options))


def load(place: str = "ckpts", save: str | None = None) -> dict[str, Any]:
    found = blank()
    dcp.load(found, storage_reader=SapwoodReader(place, save=save))
    return found


def only_save(place: str = "ckpts") -> Path:
    (found,) = Path(place).glob("dcp-????????")
    return found


# -- one rank ------------------------------------------------------------------------------


def test_what_was_saved_is_loaded():
    save(1.5)
    assert is_state(load(), 1.5)
    assert sorted(p.name for p in only_save().iterdir()) == ["manifest.json", "rank-0.bin"]
    assert not list(Path("ckpts/incoming").iterdir())


def test_the_newest_save_is_loaded_and_old_ones_go():
    for value in (1.0, 2.0, 3.0):
        save(value)
    names = sorted(p.name for p in Path("ckpts").glob("dcp-*"))
    assert names == ["dcp-00000002", "dcp-00000003"]
    assert is_state(load(), 3.0)
    assert is_state(load(save=names[0]), 2.0)


def test_checkpoint_id_names_the_place():
    dcp.save(state(1.0), checkpoint_id="other", storage_writer=SapwoodWriter("ckpts"))
    found = blank()
    dcp.load(found, checkpoint_id="other", storage_reader=SapwoodReader("ckpts"))
    assert is_state(found, 1.0)
    assert not Path("ckpts").exists()


def test_metadata_keeps_its_version_and_where_it_is_of():
    # As torch's own suite asks of its reader and writer (test_planner, test_fsspec).
    writer, reader = SapwoodWriter("ckpts"), SapwoodReader("ckpts")
    dcp.save(state(1.0), storage_writer=writer)
    metadata = reader.read_metadata()
    assert metadata.version == CURRENT_DCP_VERSION
    meta = metadata.storage_meta
    assert meta is not None
    assert str(meta.checkpoint_id) == "ckpts"
    assert meta.save_id == writer.save_id
    assert meta.load_id == reader.load_id
    planner = DefaultLoadPlanner()
    dcp.load(blank(), storage_reader=SapwoodReader("ckpts"), planner=planner)
    assert planner.metadata is not None
    assert planner.metadata.version == CURRENT_DCP_VERSION


def test_a_reset_begins_another_save_or_load():
    class Planner(DefaultSavePlanner):
        def set_up_planner(self, state_dict: Any, storage_meta: Any = None, **rest: Any) -> None:
            seen.append(storage_meta.save_id)
            super().set_up_planner(state_dict, storage_meta, **rest)

    seen: list[str] = []
    writer, reader = SapwoodWriter("ckpts"), SapwoodReader("ckpts")
    for value in (1.0, 2.0):
        dcp.save(state(value), checkpoint_id="ckpts", storage_writer=writer, planner=Planner())
    names = ("dcp-00000001", "dcp-00000002")
    metas = [SapwoodReader("ckpts", save=name).read_metadata().storage_meta for name in names]
    assert [meta.save_id for meta in metas if meta] == seen
    assert len(set(seen)) == 2
    before = reader.load_id
    reader.reset()
    assert reader.load_id != before


def test_metadata_of_saves_by_earlier_versions_is_read():
    save(1.0)
    path = only_save() / "manifest.json"
    body = json.loads(unseal(path.read_bytes(), "manifest"))
    for name in ("version", "storage"):
        del body[name]
    path.write_bytes(seal(json.dumps(body, separators=(",", ":")).encode()))
    assert is_state(load(), 1.0)
    metadata = SapwoodReader("ckpts").read_metadata()
    assert metadata.version is None
    assert metadata.storage_meta is not None


def test_a_save_on_a_full_disk_leaves_nothing_behind():
    save(1.0)
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    for name in ("bin", "manifest.json"):

        def fail(op: str, path: Path, name: str = name, **_: Any) -> None:
            if op == "write" and name in path.name:
                raise full

        with (
            faults.inject("files", fail, at=None),
            pytest.raises(CheckpointException, match="No space left on device"),
        ):
            save(2.0)
        assert [p.name for p in Path("ckpts").glob("dcp-*")] == ["dcp-00000001"]
        assert not list(Path("ckpts/incoming").iterdir())
    assert is_state(load(), 1.0)


def test_a_model_and_its_optimizer_go_on_where_they_were():
    def made() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
        return model, torch.optim.AdamW(model.parameters(), lr=0.01)

    def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
        generator = torch.Generator().manual_seed(2)
        losses = []
        for _ in range(3):
            optimizer.zero_grad()
            loss = model(torch.randn(6, 5, generator=generator)).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    model, optimizer = made()
    train(model, optimizer)
    ours, theirs = get_state_dict(model, optimizer)
    dcp.save({"model": ours, "optimizer": theirs}, storage_writer=SapwoodWriter("ckpts"))
    expected = train(model, optimizer)

    model, optimizer = made()
    ours, theirs = get_state_dict(model, optimizer)
    found = {"model": ours, "optimizer": theirs}
    dcp.load(found, storage_reader=SapwoodReader("ckpts"))
    set_state_dict(
        model, optimizer, model_state_dict=found["model"], optim_state_dict=found["optimizer"]
    )
    assert train(model, optimizer) == expected


def test_cached_plans_save_new_values_into_new_folders():
    for value in (1.0, 2.0, 3.0):
        planner = DefaultSavePlanner(enable_plan_caching=True)
        dcp.save(state(value), storage_writer=SapwoodWriter("ckpts"), planner=planner)
        assert is_state(load(), value)


# -- the silent failures -------------------------------------------------------------------


def file_operations() -> int:
    with faults.inject("files", "sleep:0", at=None) as fault:
        save(0.0, "count")
    return fault.seen


def test_a_crash_at_any_file_operation_leaves_the_old_save_or_the_new_one():
    """A. Torch's writer, stopped before ``finish``, leaves the new values under the old name."""
    seen = set()
    for at in range(1, file_operations() + 3):
        place = f"at-{at}"
        save(1.0, place)
        with faults.inject("files", "raise", at=at) as fault:
            try:
                save(2.0, place)
            except CheckpointException:
                assert fault.seen >= at
        found = load(place)
        is_old, is_new = is_state(found, 1.0), is_state(found, 2.0)
        assert is_old or is_new, f"a mix after a crash at operation {at}"
        seen.add(is_new)
        save(3.0, place)
        assert is_state(load(place), 3.0)
    assert seen == {False, True}


def test_a_data_file_of_another_save_is_not_taken():
    """B. Torch's reader gives a mix of two steps when data files are half overwritten."""
    save(1.0)
    save(2.0)
    old, new = sorted(Path("ckpts").glob("dcp-*"))
    (new / "rank-0.bin").write_bytes((old / "rank-0.bin").read_bytes())
    found = blank()
    with pytest.raises(CheckpointException, match="do not match their checksum"):
        dcp.load(found, storage_reader=SapwoodReader("ckpts"))
    assert is_state(found, -1.0), "the state dict was touched"
    assert is_state(load(save=old.name), 1.0)


@pytest.mark.parametrize("where", [0, 0.3, 0.6])
def test_a_flipped_bit_is_noticed_before_anything_is_loaded(where):
    """C. Torch's reader loads it."""
    save(1.0)
    path = only_save() / "rank-0.bin"
    content = bytearray(path.read_bytes())
    content[int(where * len(content))] ^= 0x40
    path.write_bytes(content)
    found = blank()
    with pytest.raises(CheckpointException, match="bytes 0 to"):
        dcp.load(found, storage_reader=SapwoodReader("ckpts"))
    assert is_state(found, -1.0)


def test_a_truncated_or_missing_file_makes_the_reader_fall_back(caplog):
    """D. And a damaged manifest is no manifest."""
    for damage in (truncate_data, remove_data, flip_manifest, truncate_manifest):
        place = damage.__name__
        save(1.0, place)
        save(2.0, place)
        damage(sorted(Path(place).glob("dcp-*"))[-1])
        assert is_state(load(place), 1.0)
        assert "is passed over" in caplog.text
        caplog.clear()


def truncate_data(home: Path) -> None:
    path = home / "rank-0.bin"
    os.truncate(path, path.stat().st_size // 2)


def remove_data(home: Path) -> None:
    (home / "rank-0.bin").unlink()


def flip_manifest(home: Path) -> None:
    path = home / "manifest.json"
    content = bytearray(path.read_bytes())
    content[100] ^= 1
    path.write_bytes(content)


def truncate_manifest(home: Path) -> None:
    os.truncate(home / "manifest.json", 200)


# -- what is refused -----------------------------------------------------------------------


class Foreign:
    """Something only unpickling code could bring back."""


def test_what_would_need_code_to_load_is_refused_when_saved():
    with pytest.raises(CheckpointException, match="thing is neither a tensor nor a plain value"):
        dcp.save({"thing": Foreign()}, storage_writer=SapwoodWriter("ckpts"))
    assert not list(Path("ckpts").glob("dcp-*"))
    assert not list(Path("ckpts/incoming").iterdir())


class Bomb:
    """Unpickled without restrictions, it leaves a mark."""

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (Path("exploded"),)


def test_code_in_a_save_is_never_run():
    dcp.save({"value": 3, "weight": torch.ones(2)}, storage_writer=SapwoodWriter("ckpts"))
    home = only_save()
    bomb = io.BytesIO()
    torch.save(Bomb(), bomb)
    manifest = Manifest.decode((home / "manifest.json").read_bytes(), "manifest")
    data = (home / "rank-0.bin").read_bytes()
    planted = {"start": len(data), "nbytes": len(bomb.getvalue())}
    items = tuple(
        replace(item, **planted, digests=(digest(bomb.getvalue()),))
        if item.index.fqn == "value"
        else item
        for item in manifest.items
    )
    (home / "rank-0.bin").write_bytes(data + bomb.getvalue())
    files = {"rank-0.bin": len(data) + len(bomb.getvalue())}
    (home / "manifest.json").write_bytes(replace(manifest, items=items, files=files).encode())
    found = {"value": -1, "weight": torch.zeros(2)}
    with pytest.raises(CheckpointException, match="value is not a plain value"):
        dcp.load(found, storage_reader=SapwoodReader("ckpts"))
    assert not Path("exploded").exists()
    assert found["weight"].eq(0).all()


def test_bad_settings_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="keep is 0"):
        SapwoodWriter("ckpts", keep=0)
    with pytest.raises(ConfigError, match="not to a URL"):
        SapwoodReader("s3://bucket/x")
    with pytest.raises(ConfigError, match="use_collectives=False"):
        SapwoodWriter("ckpts").set_up_storage_writer(True, use_collectives=False)


def test_an_empty_place_says_so():
    with pytest.raises(CheckpointException, match="there is no save in it"):
        load("nowhere")


def test_another_shape_is_refused():
    save(1.0)
    found = blank()
    found["weight"] = torch.zeros(2, 2)
    with pytest.raises((CheckpointException, ValueError), match=r"[Ss]ize"):
        dcp.load(found, storage_reader=SapwoodReader("ckpts"))


def test_what_dead_saves_left_goes_after_an_hour():
    save(1.0)
    old, young = Path("ckpts/incoming/aa.bin"), Path("ckpts/incoming/bb.bin")
    partial = Path("ckpts/dcp-00000099.partial")
    partial.mkdir()
    for path in (old, young):
        path.write_bytes(b"x")
    for path in (old, partial):
        os.utime(path, (time.time() - 7200,) * 2)
    save(2.0)
    assert not old.exists()
    assert not partial.exists()
    assert young.exists()
