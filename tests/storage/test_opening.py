"""Keepers by URL."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from sapwood.errors import ConfigError, NoRoom
from sapwood.storage import open_keeper, opening, register
from sapwood.storage.folder import FolderKeeper
from sapwood.storage.memory import MemoryKeeper


def test_a_folder_by_path_or_url(tmp_path: Path) -> None:
    for place in (tmp_path / "a b", str(tmp_path / "a b"), f"file://{tmp_path}/a%20b"):
        with open_keeper(place) as keeper:
            assert isinstance(keeper, FolderKeeper)
            assert keeper.folder == tmp_path / "a b"


def test_a_relative_folder_stays_where_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    keeper = open_keeper("models")
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "other")
    keeper.put("a", [b"1"])
    assert (tmp_path / "models" / "a").read_bytes() == b"1"


def test_nothing_is_made_before_the_first_object(tmp_path: Path) -> None:
    with FolderKeeper(tmp_path / "a" / "b") as keeper:
        assert list(keeper.list()) == []
        assert keeper.sweep() == 0
        keeper.remove(["x"])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("place", "words"),
    [
        ("", "empty"),
        ("gopher://x", "no keeper is known for gopher:"),
        ("memory:x", "memory has no places"),
        ("file://other/x", "no folder of this machine"),
        ("s3:///x", "expected s3://bucket/prefix"),
    ],
)
def test_places_that_are_none(place: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        open_keeper(place)


def test_one_of_somebody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opening, "_factories", dict(opening._factories))
    mine = MemoryKeeper()
    register("mine", lambda url, **options: mine)
    assert open_keeper("mine://x") is mine
    with pytest.raises(ConfigError, match="no scheme"):
        register("not one", lambda url: mine)


def test_memory_has_a_limit() -> None:
    with MemoryKeeper(limit=100_000) as keeper:
        for _ in range(3):
            keeper.put("a", [bytes(90_000)])
            with pytest.raises(NoRoom, match="90000 of 100000"):
                keeper.put("b", [bytes(20_000)])
            with keeper.begin("c") as draft, pytest.raises(NoRoom):
                draft.write_parts([bytes(1000)] * 20)
            keeper.put("d", [bytes(10_000)])
            keeper.remove(["a", "d"])
        keeper.put("a", [bytes(40_000)])
        keeper.link("a", "b")
        with pytest.raises(NoRoom):
            keeper.link("a", "c")
        keeper.remove(["a"])
        keeper.put("b", [bytes(60_000)], replace=True)
        keeper.put("a", [bytes(40_000)])


def test_the_package_loads_neither_torch_nor_obstore() -> None:
    import subprocess

    code = (
        "import sys, sapwood.storage as s; s.open_keeper('memory:').close(); "
        "s.open_keeper('/nowhere').close(); "
        "sys.exit(any(name in sys.modules for name in ('torch', 'obstore')))"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
