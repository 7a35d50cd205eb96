"""The shipped suite, on every back end there is."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import pytest

from sapwood.repository.base import Backend
from sapwood.repository.database import Database
from sapwood.repository.folder import open_folder
from sapwood.repository.local import LocalBackend
from sapwood.repository.objects.opening import open_objects
from sapwood.storage import open_keeper
from sapwood.storage.folder import FolderKeeper
from sapwood.testing import repository as suite
from sapwood.testing import seaweed

Check = Callable[[suite.Opener], None]
BY_CHECK = pytest.mark.parametrize(
    "check", [*suite.CHECKS, *suite.DAMAGE_CHECKS], ids=lambda check: check.__name__
)
BY_PROCESS_CHECK = pytest.mark.parametrize(
    "check", suite.PROCESS_CHECKS, ids=lambda check: check.__name__
)


def in_memory() -> Backend:
    return LocalBackend("memory:", Database(None), open_keeper("memory:"))


def in_folder(folder: Path) -> Backend:
    return open_folder(FolderKeeper(folder), str(folder), create=True)


def objects_in_memory() -> Backend:
    return open_objects(open_keeper("memory:"), "memory:", create=True)


def objects_in_folder(folder: Path, filesystem: str | None = None) -> Backend:
    keeper = FolderKeeper(folder, filesystem=filesystem)
    return open_objects(keeper, str(folder), create=True)


def objects_in_bucket(place: str, access: dict[str, object]) -> Backend:
    keeper = open_keeper(place, **access, timeout=20.0, retries=2)
    return open_objects(keeper, place, create=True)


def objects_in_mooncake(place: str) -> Backend:
    return open_objects(open_keeper(place), place, create=True)


@BY_CHECK
@pytest.mark.parametrize("opener", [in_memory, objects_in_memory], ids=lambda o: o.__name__)
def test_memory(check: Check, opener: suite.Opener) -> None:
    check(opener)


@BY_CHECK
def test_folder(check: Check, tmp_path: Path) -> None:
    check(functools.partial(in_folder, tmp_path / "models"))


@BY_CHECK
def test_objects_in_a_network_folder(check: Check, tmp_path: Path) -> None:
    check(functools.partial(objects_in_folder, tmp_path / "models", "nfs4"))


@BY_CHECK
def test_objects_in_a_bucket(check: Check, weed: seaweed.Server, place: str) -> None:
    check(functools.partial(objects_in_bucket, place, dict(weed.access)))


@BY_CHECK
def test_objects_in_mooncake(check: Check, moon_place: str) -> None:
    check(functools.partial(objects_in_mooncake, moon_place))


@BY_PROCESS_CHECK
def test_folder_in_several_processes(check: Check, tmp_path: Path) -> None:
    check(functools.partial(in_folder, tmp_path / "models"))


@BY_PROCESS_CHECK
def test_objects_in_a_folder_in_several_processes(check: Check, tmp_path: Path) -> None:
    check(functools.partial(objects_in_folder, tmp_path / "models"))


@BY_PROCESS_CHECK
def test_objects_in_a_bucket_in_several_processes(
    check: Check, weed: seaweed.Server, place: str
) -> None:
    check(functools.partial(objects_in_bucket, place, dict(weed.access)))


@BY_PROCESS_CHECK
def test_objects_in_mooncake_in_several_processes(check: Check, moon_place: str) -> None:
    check(functools.partial(objects_in_mooncake, moon_place))
