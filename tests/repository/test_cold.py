"""Tensors in cold form: as they were, in less room, never in a circle, and never half changed."""

from __future__ import annotations

import sqlite3
import sys
import threading
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import sapwood.store
from sapwood.cli.main import main
from sapwood.errors import ConfigError, Damaged, StoreError
from sapwood.repository import schema
from sapwood.repository.cold.form import CHUNK, ColdTable, encode, head_bytes
from sapwood.store import Repository

State = dict[str, Tensor]
ODD = CHUNK // 2 + 1003
"""Elements of two bytes: more than one chunk, and no multiple of anything."""


def trained(steps: int, dtype: torch.dtype = torch.float32, size: int = 20_000) -> list[State]:
    """Versions that differ a little, one from the next."""
    torch.manual_seed(5)
    found = [{"w": torch.randn(size, 3).to(dtype), "b": torch.randn(9000), "n": torch.arange(5)}]
    for _ in range(steps - 1):
        last = found[-1]
        step = last["w"].float() * (1 + 2e-4 * torch.randn(size, 3))
        found.append({"w": step.to(dtype), "b": last["b"] + 1e-4, "n": last["n"] + 1})
    return found


def save_all(repo: Repository, versions: list[State], name: str = "m") -> None:
    for number, state in enumerate(versions):
        repo.save(state, f"{name}@{number}", parent=f"{name}@{number - 1}" if number else None)


def check_all(repo: Repository, versions: list[State], name: str = "m") -> None:
    for number, state in enumerate(versions):
        loaded = repo.load(f"{name}@{number}")
        assert all(torch.equal(loaded[key], state[key]) for key in state), number
    assert repo.verify().problems == []


def packed(place: Path) -> int:
    return sum(path.stat().st_size for path in (place / "packs").rglob("*") if path.is_file())


def depths(place: Path) -> list[int]:
    query = (
        "WITH RECURSIVE up(id, depth) AS (SELECT id, 0 FROM blob WHERE base IS NULL UNION ALL "
        "SELECT blob.id, depth + 1 FROM up JOIN blob ON blob.base = up.id) SELECT depth FROM up"
    )
    with closing(sqlite3.connect(place / "catalog.db")) as db:
        return sorted(row[0] for row in db.execute(query))


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return tmp_path / "models"


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.float8_e4m3fn]
)
def test_versions_come_back_and_take_less_room(place: Path, dtype: torch.dtype) -> None:
    versions = trained(4, dtype)
    with sapwood.store.open(place) as repo:
        save_all(repo, versions)
        repo.gc(quiet=0.0)
        before = packed(place)
        done = repo.cool()
        assert (done.versions, done.tensors >= 3) == (4, True)
        repo.gc(quiet=0.0)
        assert packed(place) < 0.92 * before
        for number, state in enumerate(versions):
            loaded = repo.load(f"m@{number}")
            for key in state:
                assert bytes_of(loaded[key]) == bytes_of(state[key])
        assert repo.verify().problems == []
        assert repo.cool().tensors == 0  # again, there is nothing to do
    with sapwood.store.open(place) as again:
        assert bytes_of(again.load("m@3")["w"]) == bytes_of(versions[3]["w"])


def bytes_of(tensor: Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("size", [1, 2047, ODD, CHUNK // 2, 3 * CHUNK // 2 + 7])
def test_any_rows_can_be_read_alone(place: Path, size: int) -> None:
    torch.manual_seed(1)
    first = torch.randn(size, 2).to(torch.bfloat16)
    second = first.clone()
    second[:: max(1, size // 50)] *= 2
    with sapwood.store.open(place) as repo:
        save_all(repo, [{"w": first}, {"w": second}])
        done = repo.cool()
        assert done.tensors == (1 if size > 1024 else 0)
        stored = repo.open("m@1")["w"]
        for rows in (slice(0, 1), slice(size - 1, size), slice(size // 3, size // 3 + 700)):
            assert torch.equal(stored[rows], second[rows])
        assert torch.equal(stored[size - 1], second[size - 1])
        into = torch.zeros_like(second)
        repo.load("m@1", into={"w": into})
        assert torch.equal(into, second)


def test_chains_are_bounded_and_begin_anew(place: Path) -> None:
    versions = trained(9, size=2_000)
    with sapwood.store.open(place) as repo:
        save_all(repo, versions)
        repo.cool(chain=3)
        assert max(depths(place)) == 3
        check_all(repo, versions)


def test_a_chain_that_is_lengthened_in_front_is_bounded_too(place: Path) -> None:
    versions = trained(6, size=2_000)
    with sapwood.store.open(place) as repo:
        save_all(repo, versions)
        backend: Any = repo._backend
        for number in (5, 4, 3, 2, 1):
            backend.cool(repo.info(f"m@{number}"), chain=2, said=lambda _: None)
        assert max(depths(place)) == 2
        check_all(repo, versions)


def test_going_back_to_old_values_makes_no_circle(place: Path) -> None:
    one, two = trained(2)
    with sapwood.store.open(place) as repo:
        save_all(repo, [one, two, one, two, one])
        repo.cool()
        check_all(repo, [one, two, one, two, one])
        repo.cool()
        check_all(repo, [one, two, one, two, one])


def test_what_saves_nothing_stays_plain(place: Path) -> None:
    torch.manual_seed(2)
    noise = [{"w": torch.randint(0, 256, (50_000,), dtype=torch.uint8)} for _ in range(2)]
    with sapwood.store.open(place) as repo:
        save_all(repo, noise)
        done = repo.cool()
        assert (done.tensors, done.kept) == (0, 1)
        check_all(repo, noise)
        repo.gc(quiet=0.0)
        assert packed(place) < 100_200


def test_parents_may_go_and_their_tensors_stay_as_long_as_needed(place: Path) -> None:
    versions = trained(5)
    with sapwood.store.open(place) as repo:
        save_all(repo, versions)
        repo.cool()
        for number in (0, 1, 2, 3):
            repo.remove(f"m@{number}")
            repo.gc(quiet=0.0)
            loaded = repo.load("m@4")
            assert all(torch.equal(loaded[key], versions[4][key]) for key in loaded)
        assert repo.verify().problems == []
        repo.remove("m@4")
        assert repo.gc(quiet=0.0).live == 0
    assert packed(place) == 0
    assert depths(place) == []


def test_a_version_differs_from_its_nearest_ancestor_that_is_there(place: Path) -> None:
    versions = trained(4)
    with sapwood.store.open(place) as repo:
        save_all(repo, versions)
        repo.remove("m@1")
        repo.remove("m@2")
        assert repo.cool().tensors == 2
        loaded = repo.load("m@3")
        assert all(torch.equal(loaded[key], versions[3][key]) for key in loaded)


def test_what_is_saved_later_shares_with_what_is_cold(place: Path) -> None:
    versions = trained(3)
    with sapwood.store.open(place) as repo:
        save_all(repo, versions)
        repo.cool()
        repo.gc(quiet=0.0)
        before = packed(place)
        repo.save(versions[2], "child@1", parent="m@2")
        repo.save(versions[2], "stranger@1")
        repo.gc(quiet=0.0)
        assert packed(place) - before < 5_000
        for name in ("child@1", "stranger@1"):
            assert torch.equal(repo.load(name)["w"], versions[2]["w"])
        assert repo.verify().problems == []


def test_loaded_tensors_may_be_written_to(place: Path) -> None:
    versions = trained(2)
    with sapwood.store.open(place) as repo:
        save_all(repo, versions)
        repo.cool()
        repo.load("m@1")["w"].zero_()
        check_all(repo, versions)


def test_only_old_ones_and_only_those_named(place: Path) -> None:
    with sapwood.store.open(place) as repo:
        save_all(repo, trained(2), "a/x")
        save_all(repo, trained(2, torch.float16), "b/x")
        assert repo.cool(older_than=3600.0).versions == 0
        assert repo.cool("b/*").versions == 2
        assert repo.cool("a/*").tensors == 1  # the other one is the same as b's


@pytest.mark.parametrize("options", [{"chain": 0}, {"older_than": -1.0}])
def test_odd_arguments(place: Path, options: dict[str, Any]) -> None:
    with sapwood.store.open(place) as repo, pytest.raises(ConfigError, match="expected 1, and 0"):
        repo.cool(**options)


def test_without_zstandard_it_is_said(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    versions = trained(2)
    with sapwood.store.open(place) as repo:
        save_all(repo, versions)
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, "zstandard", None)
            with pytest.raises(ConfigError, match=r"sapwood\[compression\]"):
                repo.cool()
        repo.cool()
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, "zstandard", None)
            with pytest.raises(ConfigError, match=r"sapwood\[compression\]"):
                repo.load("m@1")
        check_all(repo, versions)


def test_memory_can_be_cold_too() -> None:
    versions = trained(3)
    with sapwood.store.open("memory:") as repo:
        save_all(repo, versions)
        assert repo.cool().tensors == 4
        check_all(repo, versions)


# -- damage ----------------------------------------------------------------------------------------


def flip(place: Path, offset: float) -> None:
    """Change a byte in every pack."""
    for path in (place / "packs").rglob("*"):
        if path.is_file():
            content = bytearray(path.read_bytes())
            content[int(offset * len(content))] ^= 0x10
            path.write_bytes(content)


@pytest.mark.parametrize("offset", [0.0, 0.2, 0.5, 0.9])
def test_damage_is_found_and_named(place: Path, offset: float) -> None:
    with sapwood.store.open(place) as repo:
        save_all(repo, trained(2))
        repo.cool()
        repo.gc(quiet=0.0)
    flip(place, offset)
    with sapwood.store.open(place) as repo:
        problems = repo.verify().problems
        assert problems
        assert any("m@1" in problem or "m@0" in problem for problem in problems)


def test_a_damaged_tensor_is_not_made_cold(place: Path) -> None:
    with sapwood.store.open(place) as repo:
        save_all(repo, trained(2))
        repo.flush()
    flip(place, 0.1)
    with sapwood.store.open(place) as repo:
        with pytest.raises(Damaged, match="it stays as it is"):
            repo.cool()
        assert max(depths(place)) == 0


def test_tables_are_checked_before_they_are_used() -> None:
    data, base = np.arange(9000, dtype=np.uint8).data, np.zeros(9000, np.uint8).data
    form = encode(data, base, 4)
    assert form is not None
    size = head_bytes(9000)
    ColdTable.decode(memoryview(form)[:size], 9000, len(form))
    generator = np.random.default_rng(3)
    for _ in range(300):
        head = bytearray(form[:size])
        head[generator.integers(0, size)] ^= 1 << int(generator.integers(0, 8))
        try:
            table = ColdTable.decode(memoryview(head), 9000, len(form))
        except Damaged:
            continue
        assert table.starts[-1] == len(form)
    with pytest.raises(Damaged):
        ColdTable.decode(memoryview(form)[:size], 9001, len(form))


def test_who_cannot_read_it_is_told(place: Path) -> None:
    with sapwood.store.open(place) as repo:
        save_all(repo, trained(2))
        repo.cool()
        backend: Any = repo._backend
        blobs = [blob for blob in repo.open("m@1").manifest.blobs if blob >= 0]
        with pytest.raises(StoreError, match="is in cold form"):
            backend.catalog.places(blobs)


# -- beside others ---------------------------------------------------------------------------------


def test_readers_notice_nothing(place: Path) -> None:
    versions = trained(8, size=5_000)
    with sapwood.store.open(place) as repo:
        save_all(repo, versions)
        repo.flush()
        stop, wrong = threading.Event(), []

        def read() -> None:
            with sapwood.store.open(place) as mine:
                number = 0
                while not stop.is_set():
                    loaded = mine.load(f"m@{number % 8}", layers="w")["w"]
                    part = mine.open(f"m@{number % 8}")["w"][100:200]
                    whole = versions[number % 8]["w"]
                    if not torch.equal(loaded, whole) or not torch.equal(part, whole[100:200]):
                        wrong.append(number)
                    number += 1

        reader = threading.Thread(target=read)
        reader.start()
        for chain in (1, 2, 3, 8):
            repo.cool(chain=chain)
            repo.gc(quiet=0.0)
        stop.set()
        reader.join(60)
        assert not reader.is_alive()
        assert not wrong
        check_all(repo, versions)


# -- catalogs of before ----------------------------------------------------------------------------


def as_version_2(place: Path) -> None:
    """What an earlier version of Sapwood has left."""
    with closing(sqlite3.connect(place / "catalog.db")) as db:
        db.execute("DROP INDEX blob_by_base")
        db.execute("ALTER TABLE blob DROP COLUMN base")
        db.execute("ALTER TABLE blob DROP COLUMN stored")
        db.execute("ALTER TABLE pack DROP COLUMN synced")
        db.execute("PRAGMA user_version=2")
        db.commit()


def tables(place: Path) -> dict[str, list[Any]]:
    with closing(sqlite3.connect(place / "catalog.db")) as db:
        names = [row[0] for row in db.execute("SELECT name FROM sqlite_master ORDER BY name")]
        return {name: db.execute(f"PRAGMA table_info({name})").fetchall() for name in names}


def test_a_repository_of_before_is_opened_and_goes_on(place: Path) -> None:
    versions = trained(3)
    with sapwood.store.open(place) as repo:
        save_all(repo, versions[:2])
    expected = tables(place)
    as_version_2(place)
    assert tables(place) != expected
    barrier = threading.Barrier(4)
    failed = []

    def enter() -> None:
        barrier.wait()
        try:
            with sapwood.store.open(place) as mine:
                mine.load("m@1")
        except StoreError as error:
            failed.append(error)

    together = [threading.Thread(target=enter) for _ in range(4)]
    for one in together:
        one.start()
    for one in together:
        one.join(60)
    assert not failed
    assert tables(place) == expected
    with sapwood.store.open(place) as repo:
        repo.save(versions[2], "m@2", parent="m@1")
        repo.cool()
        check_all(repo, versions)


def test_a_catalog_of_a_newer_version_is_left_alone(place: Path) -> None:
    with sapwood.store.open(place) as repo:
        save_all(repo, trained(1))
    with closing(sqlite3.connect(place / "catalog.db")) as db:
        db.execute(f"PRAGMA user_version={schema.SCHEMA_VERSION + 1}")
    with pytest.raises(StoreError, match="a newer one"):
        sapwood.store.open(place)


# -- the command line ------------------------------------------------------------------------------


def test_the_command_line(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with sapwood.store.open(place) as repo:
        save_all(repo, trained(3))
    assert main(["store", "cool", "--at", str(place), "--older-than", "1h"]) == 0
    assert "0 tensors of 0 versions" in capsys.readouterr().out
    assert main(["store", "cool", "m*", "--at", str(place)]) == 0
    assert "4 tensors of 3 versions take" in capsys.readouterr().out
    assert main(["store", "verify", "--at", str(place)]) == 0
