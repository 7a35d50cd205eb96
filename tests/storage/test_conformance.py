"""The shipped suite, on every keeper there is."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import pytest

from sapwood.storage import open_keeper
from sapwood.storage.folder import FolderKeeper
from sapwood.storage.s3.draft import PART
from sapwood.testing import seaweed
from sapwood.testing import storage as suite

Check = Callable[[suite.Opener], None]
BY_CHECK = pytest.mark.parametrize("check", suite.CHECKS, ids=lambda check: check.__name__)


def in_folder(folder: Path, **options: str) -> suite.Opener:
    return functools.partial(FolderKeeper, folder, **options)


def in_bucket(weed: seaweed.Server, place: str) -> suite.Opener:
    return functools.partial(open_keeper, place, **weed.access, timeout=20.0, retries=2)


@BY_CHECK
def test_memory(check: Check) -> None:
    check(functools.partial(open_keeper, "memory:"))


@BY_CHECK
def test_folder(check: Check, tmp_path: Path) -> None:
    check(in_folder(tmp_path / "place"))


@BY_CHECK
def test_network_folder(check: Check, tmp_path: Path) -> None:
    check(in_folder(tmp_path / "place", filesystem="nfs4"))


@BY_CHECK
def test_s3(check: Check, weed: seaweed.Server, place: str) -> None:
    check(in_bucket(weed, place))


@BY_CHECK
def test_mooncake(check: Check, moon_place: str) -> None:
    check(functools.partial(open_keeper, moon_place))


@pytest.mark.parametrize(
    "check",
    [suite.check_mapping, suite.check_sharing, suite.check_links],
    ids=lambda check: check.__name__,
)
@pytest.mark.parametrize("kind", ["memory", "folder"])
def test_capabilities(check: Check, kind: str, tmp_path: Path) -> None:
    check(in_folder(tmp_path) if kind == "folder" else functools.partial(open_keeper, "memory:"))


def test_memory_adopts() -> None:
    suite.check_adopting(functools.partial(open_keeper, "memory:"))


def test_a_network_folder_is_not_mapped(tmp_path: Path) -> None:
    suite.check_cannot_map(in_folder(tmp_path, filesystem="nfs4"))


def test_writers_race_in_a_folder(tmp_path: Path) -> None:
    suite.check_racing_writers(in_folder(tmp_path), rounds=20)


@pytest.mark.parametrize("nbytes", [1000, PART + 1], ids=["one request", "an upload"])
def test_writers_race_in_a_bucket(weed: seaweed.Server, place: str, nbytes: int) -> None:
    suite.check_racing_writers(in_bucket(weed, place), nbytes=nbytes, rounds=4)


def test_writers_race_in_mooncake(moon_place: str) -> None:
    suite.check_racing_writers(functools.partial(open_keeper, moon_place), nbytes=100_000)


def test_a_writer_killed_in_a_folder(tmp_path: Path) -> None:
    suite.check_killed_writer(in_folder(tmp_path))


def test_a_writer_killed_in_a_network_folder(tmp_path: Path) -> None:
    suite.check_killed_writer(in_folder(tmp_path, filesystem="nfs4"))


def test_a_writer_killed_in_an_upload(weed: seaweed.Server, place: str) -> None:
    suite.check_killed_writer(in_bucket(weed, place), nbytes=PART + 1)
