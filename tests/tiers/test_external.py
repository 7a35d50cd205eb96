"""A shared folder: the contract, files any tool can read, races, and every kind of damage."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from threading import Barrier

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from sapwood.errors import CheckpointError, TierError
from sapwood.state.catalog import Catalog, Entry
from sapwood.state.shards import plan_shards
from sapwood.testing import faults
from sapwood.tiers.base import Stored, verify
from sapwood.tiers.digest import seal, unseal
from sapwood.tiers.external import ExternalTier
from sapwood.tiers.record import CheckpointId, ShardRecord, describe
from tests.tiers import contract
from tests.tiers.shards import ATTEMPT, shard

ID = CheckpointId(7, ATTEMPT)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "shared"
    path.mkdir()
    return path


def put_all(tier: ExternalTier, world: int = 2, step: int = 7) -> None:
    for rank in range(world):
        tier.put(*shard(step, rank, world))


def names(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


@pytest.mark.parametrize("world", [1, 2, 3])
def test_the_contract(folder: Path, world: int) -> None:
    contract.keeps_shards(ExternalTier(folder / "a" / "b"), world)


def test_a_complete_checkpoint_is_two_files_records_and_a_manifest(folder: Path) -> None:
    tier = ExternalTier(folder)
    tier.put(*shard(7, 1, 2))
    assert names(folder) == [f"{ID}.partial"]
    assert list(tier.shards()) == [Stored(ID, 1)]
    contract.read_all(tier, Stored(ID, 1))
    tier.put(*shard(7, 0, 2))
    assert names(folder) == [str(ID)]
    assert names(folder / str(ID)) == [
        "manifest.json",
        "model.safetensors",
        "optimizer.safetensors",
        "shard-0.json",
        "shard-1.json",
    ]
    manifest = tier.check(ID)
    assert (manifest.id, manifest.world, manifest.created) == (ID, 2, 7.0)
    sizes = {n: (folder / str(ID) / n).stat().st_size for n in manifest.files}
    assert sizes == manifest.files


DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I16": torch.int16,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F64": torch.float64,
    "I64": torch.int64,
    "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn,
}


def tensors(seed: int) -> dict[str, tuple[str, torch.Tensor]]:
    """Tensors of every kind: scalars, empty ones, odd sizes, and one that is sliced."""
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for name, dtype in DTYPES.items():
        for n, shape in enumerate([(), (3,), (0, 2), (5, 7), (11, 13)]):
            value = torch.randn(shape, generator=generator) * 50
            found[f"ünï.{name}.{n}"] = name, value.to(dtype)
    found["large"] = "F32", torch.randn(300, 1000, generator=generator)
    return found


def raw(tensor: torch.Tensor) -> np.ndarray:
    return tensor.reshape(-1).view(torch.uint8).numpy()


def saved(world: int, rank: int, files: dict[str, dict[str, tuple[str, torch.Tensor]]]) -> tuple:
    everyone = tuple(range(world))
    catalog = Catalog(
        tuple(
            Entry(file=file, name=name, dtype=dtype, shape=tuple(t.shape), holders=everyone)
            for file, named in files.items()
            for name, (dtype, t) in named.items()
        )
    )
    piece_of = plan_shards(catalog, world).shards[rank]
    memory = np.zeros(piece_of.nbytes, np.uint8)
    for p in piece_of.pieces:
        source = files[p.file][p.name][1]
        memory[p.at : p.at + p.nbytes] = raw(source)[p.start : p.stop]
    record = describe(
        id=ID, world=world, catalog=catalog, shard=piece_of, data=memory, created=1.0, extras={}
    )
    return record, memory


@pytest.mark.parametrize("world", [1, 3])
def test_any_tool_can_read_it(folder: Path, world: int) -> None:
    files = {"model": tensors(1), "optimizer": tensors(2)}
    tier = ExternalTier(folder)
    for rank in range(world):
        tier.put(*saved(world, rank, files))
    for file, named in files.items():
        path = folder / str(ID) / f"{file}.safetensors"
        with safe_open(path, "pt") as opened:
            assert opened.metadata() == {"format": "pt"}
        loaded = load_file(path)
        assert loaded.keys() == named.keys()
        for name, (_, expected) in named.items():
            assert (loaded[name].dtype, loaded[name].shape) == (expected.dtype, expected.shape)
            assert raw(loaded[name]).tobytes() == raw(expected).tobytes()


def test_small_neighbours_are_written_together(folder: Path) -> None:
    files = {"model": {f"t{n:04d}": ("F32", torch.full((n % 5,), float(n))) for n in range(3000)}}
    tier = ExternalTier(folder)
    with faults.inject("files", lambda **_: None, at=None, when=lambda op, **_: op == "write") as f:
        tier.put(*saved(1, 0, files))
    assert f.seen < 10
    loaded = load_file(folder / str(ID) / "model.safetensors")
    assert all(torch.equal(loaded[name], t) for name, (_, t) in files["model"].items())


def test_putting_again_after_the_end_changes_nothing(folder: Path) -> None:
    tier = ExternalTier(folder)
    put_all(tier)
    before = {p: (p.stat().st_mtime_ns, p.stat().st_ino) for p in folder.rglob("*")}
    with faults.inject("files", lambda **_: None, at=None, when=lambda op, **_: op != "x") as f:
        put_all(tier)
    assert f.seen == 4  # syncs only
    assert {p: (p.stat().st_mtime_ns, p.stat().st_ino) for p in folder.rglob("*")} == before


def test_another_shard_under_the_same_name(folder: Path) -> None:
    tier = ExternalTier(folder)
    record, memory = shard(7, 0, 2)
    other = ShardRecord(**{**vars_of(record), "created": 99.0})
    tier.put(other, memory)
    tier.put(record, memory)
    with closing(tier.open(Stored(ID, 0))) as found:
        assert found.record == record
    tier.put(*shard(7, 1, 2))
    with pytest.raises(TierError, match="is complete and has another shard 0"):
        tier.put(other, memory)


def vars_of(record: ShardRecord) -> dict[str, object]:
    return {name: getattr(record, name) for name in ShardRecord.__dataclass_fields__}


# -- ranks that do not agree -----------------------------------------------------------------


def test_ranks_with_other_tensors_are_named(folder: Path) -> None:
    tier = ExternalTier(folder / "shared")
    files = {"model": {"a": ("F32", torch.ones(4))}}
    tier.put(*saved(3, 0, files))
    tier.put(*saved(3, 1, files))
    strange = saved(3, 2, {"model": {"b": ("F32", torch.ones(4))}})
    with pytest.raises(TierError, match=r"ranks \[0\] have other tensors .* than rank 2"):
        tier.put(*strange)
    # The same, had all of them written at once, before any record was there to compare with.
    ExternalTier(folder / "apart").put(*strange)
    record = folder / "apart" / f"{ID}.partial" / "shard-2.json"
    record.rename(folder / "shared" / f"{ID}.partial" / "shard-2.json")
    with pytest.raises(TierError, match=r"ranks \[2\] have other tensors .* than rank 0"):
        tier.finish(ID)
    with pytest.raises(TierError, match=r"ranks \[2\] have other tensors .* than rank 1"):
        tier.put(*saved(3, 1, files))
    assert tier.finish_all() == []
    assert names(folder / "shared") == [f"{ID}.partial"]


@pytest.mark.parametrize("large", [2**15 - 64, 2**15 + 64])
def test_another_size_is_refused_before_anything_is_written(folder: Path, large: int) -> None:
    tier = ExternalTier(folder)
    tier.put(*shard(7, 0, 2))
    with pytest.raises(TierError, match="must save the same model"):
        tier.put(*shard(7, 1, 2, large=large))
    contract.read_all(tier, Stored(ID, 0))


def test_a_file_is_never_cut_short_for_others(folder: Path) -> None:
    tier = ExternalTier(folder)
    tier.put(*shard(7, 0, 2))
    (folder / f"{ID}.partial" / "shard-0.json").unlink()  # as if it were still being written
    with pytest.raises(TierError, match=r"need .* must save the same model"):
        tier.put(*shard(7, 1, 2, large=2**15 - 64))


def test_another_world_is_refused(folder: Path) -> None:
    tier = ExternalTier(folder)
    files = {"model": {"a": ("F32", torch.ones(4)), "b": ("F32", torch.ones(4))}}
    tier.put(*saved(3, 1, files))
    one, memory = saved(2, 0, files)
    with pytest.raises(TierError, match=r"ranks \[1\] have .* another number of ranks"):
        tier.put(one, memory)


# -- several engines at once -----------------------------------------------------------------


def at_once(works: list[Callable[[], object]]) -> None:
    barrier = Barrier(len(works))

    def run(work: Callable[[], object]) -> object:
        barrier.wait(30)
        return work()

    with ThreadPoolExecutor(len(works)) as pool:
        for done in [pool.submit(run, work) for work in works]:
            done.result(60)


def test_engines_that_finish_and_drop_at_once_all_end_well(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fsync", lambda fd: None)  # the device is not what is tested here
    world = 6
    for step in range(1, 16):
        shards = [shard(step, rank, world) for rank in range(world)]
        tiers = [ExternalTier(folder) for _ in range(world)]
        id = shards[0][0].id
        at_once([lambda t=t, s=s: t.put(*s) for t, s in zip(tiers, shards, strict=True)])
        assert names(folder) == [str(id)]
        assert [n for n in names(folder / str(id)) if n.startswith(".")] == []
        tiers[0].check(id)
        for rank, (_, memory) in enumerate(shards):
            assert np.array_equal(contract.read_all(tiers[0], Stored(id, rank)), memory)
        at_once([lambda t=t, id=id: t.drop(id) for t in tiers])
        assert names(folder) == []


def test_a_folder_renamed_under_a_reader(folder: Path) -> None:
    tier = ExternalTier(folder)
    tier.put(*shard(7, 0, 2))
    with closing(tier.open(Stored(ID, 0))) as found:
        tier.put(*shard(7, 1, 2))
        verify(found)
    assert list(tier.shards()) == [Stored(ID, 0), Stored(ID, 1)]


# -- engines that died -----------------------------------------------------------------------


def unfinished(folder: Path, world: int = 2) -> ExternalTier:
    tier = ExternalTier(folder)
    for rank in range(world - 1):
        tier.put(*shard(7, rank, world))
    with (
        faults.inject("files", "raise", when=lambda op, path: path == folder / str(ID)),
        pytest.raises(faults.InjectedError),
    ):
        tier.put(*shard(7, world - 1, world))
    assert names(folder) == [f"{ID}.partial"]
    return tier


def test_what_dead_engines_left_is_finished(folder: Path) -> None:
    tier = unfinished(folder)
    assert len(tier.shards()) == 2
    assert tier.finish_all() == [ID]
    tier.check(ID)
    assert names(folder) == [str(ID)]
    assert tier.finish_all() == []
    assert tier.finish(ID)


def test_an_incomplete_checkpoint_is_not_finished(folder: Path) -> None:
    tier = ExternalTier(folder)
    tier.put(*shard(7, 1, 2))
    assert not tier.finish(ID)
    assert not tier.finish(CheckpointId(8, ATTEMPT))
    assert tier.finish_all() == []
    assert names(folder) == [f"{ID}.partial"]


def test_leftovers_of_removals_are_swept(folder: Path) -> None:
    tier = ExternalTier(folder)
    put_all(tier)
    (folder / f"{ID}.dropped").mkdir()
    (folder / f"{ID}.dropped" / "model.safetensors").write_text("x")
    (folder / "mine.dropped").mkdir()
    tier.drop(ID)
    assert names(folder) == ["mine.dropped"]


# -- damage ----------------------------------------------------------------------------------


def flip(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 0x10
    path.write_bytes(content)


def test_every_flipped_bit_of_the_data_is_found(folder: Path) -> None:
    tier = ExternalTier(folder)
    record, memory = shard(7, 0, 1, large=64)
    tier.put(record, memory)
    for layout in record.catalog.layouts.values():
        path = folder / str(ID) / layout.filename
        for at in range(len(layout.header), layout.size, 7):
            flip(path, at)
            with (
                closing(tier.open(Stored(ID, 0))) as found,
                pytest.raises(CheckpointError, match="do not match their checksum"),
            ):
                verify(found)
            flip(path, at)
    with closing(tier.open(Stored(ID, 0))) as found:
        verify(found)


@pytest.mark.parametrize("name", ["manifest.json", "shard-1.json", "optimizer.safetensors"])
def test_every_flipped_bit_of_what_describes_it_is_found(folder: Path, name: str) -> None:
    tier = ExternalTier(folder)
    put_all(tier)
    path = folder / str(ID) / name
    for at in range(0, min(path.stat().st_size, 4096), 41):
        flip(path, at)
        with pytest.raises(CheckpointError):
            tier.check(ID)
        flip(path, at)
    tier.check(ID)


@pytest.mark.parametrize("name", ["model.safetensors", "shard-0.json", "manifest.json"])
@pytest.mark.parametrize("keep", [0, 1, 0.5])
def test_truncated_and_missing_files_are_found(folder: Path, name: str, keep: float) -> None:
    tier = ExternalTier(folder)
    put_all(tier)
    path = folder / str(ID) / name
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * keep) if keep < 1 else -1])
    with pytest.raises(CheckpointError):
        tier.check(ID)
    path.unlink()
    with pytest.raises(CheckpointError):
        tier.check(ID)
    if name != "manifest.json":
        with pytest.raises(CheckpointError, match=f"{name} is not there"):
            tier.open(Stored(ID, 0))


def test_a_damaged_record_of_another_rank_is_an_error_to_report(folder: Path) -> None:
    tier = ExternalTier(folder)
    tier.put(*shard(7, 0, 2))
    flip(folder / f"{ID}.partial" / "shard-0.json", 50)
    with pytest.raises(TierError, match="damaged"):
        tier.put(*shard(7, 1, 2))
    put_all(tier)  # rank 0 puts its shard again
    tier.check(ID)


def test_what_is_not_ours_is_left_alone(folder: Path) -> None:
    (folder / "notes.txt").write_text("mine")
    (folder / "other.partial").mkdir()
    (folder / "00000001-zzzzzz").mkdir()
    (folder / str(ID)).write_text("a file")
    tier = ExternalTier(folder)
    before = names(folder)
    assert list(tier.shards()) == []
    assert tier.finish_all() == []
    tier.drop(CheckpointId(1, ATTEMPT))
    tier.drop(ID)
    assert names(folder) == before


def test_a_place_that_cannot_be_used_is_an_error_to_try_again(folder: Path) -> None:
    (folder / "file").write_text("")
    tier = ExternalTier(folder / "file")
    with pytest.raises(TierError, match="cannot write checkpoint"):
        tier.put(*shard(1, 0, 1))
    with pytest.raises(TierError, match="cannot list"):
        tier.shards()


def test_a_record_is_judged_by_what_it_says_and_not_by_its_spaces(folder: Path) -> None:
    tier = ExternalTier(folder)
    tier.put(*shard(7, 1, 2))
    path = folder / f"{ID}.partial" / "shard-1.json"
    body = json.loads(unseal(path.read_bytes(), "record"))
    path.write_bytes(seal(json.dumps(body, indent=1).encode()))
    tier.put(*shard(7, 0, 2))
    tier.check(ID)
    assert np.array_equal(contract.read_all(tier, Stored(ID, 1)), shard(7, 1, 2)[1])


def test_what_crashes_left_of_older_checkpoints_goes_with_the_next_drop(tmp_path: Path) -> None:
    tier = ExternalTier(tmp_path)
    for step in (4, 5):
        tier.put(*shard(step, 0, 1))
    rest, newer = tmp_path / "00000003-ffffff.partial", tmp_path / "00000006-ffffff.partial"
    for home in (rest, newer):  # bytes whose record was never written
        home.mkdir()
        (home / "model.safetensors").write_bytes(b"x")
    tier.drop(CheckpointId(4, ATTEMPT))
    assert not rest.exists()
    assert newer.exists()
    assert [s.id.step for s in tier.shards()] == [5]
