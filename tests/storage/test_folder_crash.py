"""Kill -9, every error a disk can give, and a cut of power, at every file operation of a folder."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sapwood.errors import NoRoom, NotFound, StorageError
from sapwood.storage.base import Durability
from sapwood.storage.folder import FolderKeeper
from sapwood.storage.folderdraft import DRAFTS
from sapwood.testing import faults
from tests.storage.dying import dies, inside
from tests.storage.power import VARIANTS, Op, RecordingFiles, Replay, build

OLD, NEW = b"old" * 3000, b"new!" * 5000
KEPT, CHANGED, ADDED = "kept", "deep/changed", "deep/er/added"
SYNCED = Durability.SYNCED
ALLOWED = {KEPT: {OLD}, CHANGED: {OLD, NEW}, ADDED: {NEW}}
"""What each object may be, whenever a process is killed."""

Work = Callable[[FolderKeeper], None]


def add(keeper: FolderKeeper) -> None:
    with keeper.begin(ADDED, len(NEW), durability=SYNCED) as draft:
        draft.write(NEW[:1000])
        draft.write_parts([NEW[1000:1500], NEW[1500:]])
        draft.publish()


def replace(keeper: FolderKeeper) -> None:
    keeper.put(CHANGED, [NEW], replace=True, durability=SYNCED)


def link(keeper: FolderKeeper) -> None:
    keeper.put("source", [NEW], durability=SYNCED)
    keeper.link("source", ADDED, durability=SYNCED)
    keeper.remove(["source"], durability=SYNCED)


def remove(keeper: FolderKeeper) -> None:
    keeper.remove([CHANGED], durability=SYNCED)


WORKS: dict[str, tuple[Work, Callable[[FolderKeeper], bool]]] = {
    "add": (add, lambda keeper: found(keeper, ADDED) == NEW),
    "replace": (replace, lambda keeper: found(keeper, CHANGED) == NEW),
    "link": (link, lambda keeper: found(keeper, ADDED) == NEW),
    "remove": (remove, lambda keeper: found(keeper, CHANGED) is None),
}
"""What is done, and what must be so once that was told to be done."""


def found(keeper: FolderKeeper, key: str) -> bytes | None:
    try:
        return keeper.get(key)
    except NotFound:
        return None


def make(folder: Path) -> FolderKeeper:
    return FolderKeeper(folder, filesystem="ext4")  # wherever the tests' folder is


def prepare(folder: Path) -> None:
    with make(folder) as keeper:
        for key in (KEPT, CHANGED):
            keeper.put(key, [OLD], durability=SYNCED)


def check(keeper: FolderKeeper) -> None:
    """All that is there is whole, and what nobody touched is there."""
    assert found(keeper, KEPT) == OLD
    for entry in keeper.list():
        if entry.key != "source":
            assert found(keeper, entry.key) in ALLOWED[entry.key], f"{entry.key} is torn"


def drafts(folder: Path) -> list[Path]:
    return list((folder / DRAFTS).iterdir())


@pytest.fixture
def no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a process has written outlives it, synced or not; only power loss needs the device."""
    monkeypatch.setattr(os, "fsync", lambda fd: None)


@pytest.fixture(params=sorted(WORKS))
def name(request: pytest.FixtureRequest, no_device: None) -> str:
    return str(request.param)


class Scene:
    """A folder in a known state, again and again."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._template = folder / "now", folder / "template"
        prepare(self._template)

    def fresh(self) -> Path:
        shutil.rmtree(self.folder, ignore_errors=True)
        shutil.copytree(self._template, self.folder)
        return self.folder


def test_killed_at_every_operation(name: str, tmp_path: Path) -> None:
    work, done = WORKS[name]
    scene, at, alive = Scene(tmp_path), 0, False
    left = []
    while not alive:
        at += 1
        folder = scene.fresh()

        def run(tell: Callable[[], None], folder: Path = folder) -> None:
            work(make(folder))
            tell()

        killed, told = dies(run, at, folder)
        alive = not killed
        with make(folder) as keeper:
            check(keeper)
            assert done(keeper) or not told
            with keeper.begin("living") as living:
                living.write(b"1")
                left.append(keeper.sweep())
                living.write(b"2")
                living.publish()
            assert keeper.get("living") == b"12"
            assert drafts(folder) == []
            keeper.remove(["source", "living"])
            if not done(keeper):
                work(keeper)
            assert done(keeper)
            check(keeper)
    assert at > 2, "no operation was passed"
    assert max(left) == (0 if name == "remove" else 1)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EROFS])
def test_every_operation_failing(name: str, tmp_path: Path, code: int) -> None:
    work, done = WORKS[name]
    scene = Scene(tmp_path)

    def fail(**_: object) -> None:
        raise OSError(code, os.strerror(code))

    at, failed = 0, True
    while failed:
        at += 1
        folder = scene.fresh()
        with make(folder) as keeper:
            with faults.inject("files", fail, at=at, when=inside(folder)) as fault:
                try:
                    work(keeper)
                    failed = fault.seen >= at  # a draft that could not be removed is no failure
                    told: StorageError | None = None
                except StorageError as error:
                    told = error
            if told is not None:
                assert isinstance(told, NoRoom) == (code == errno.ENOSPC)
                assert os.strerror(code) in str(told)
            check(keeper)
            keeper.remove(["source"])
            if not done(keeper):
                work(keeper)
            assert done(keeper)
        with make(folder) as keeper:
            assert keeper.sweep() <= 1
            assert drafts(folder) == []
    assert at > 2, "no operation was passed"


# -- power -----------------------------------------------------------------------------------


def recorded(folder: Path, name: str) -> tuple[list[Op], int]:
    """What preparing and the work did to the device, and where the work begins and is told of."""
    log: list[Op] = []
    folder.mkdir()
    keeper = FolderKeeper(
        folder / "a" / "place", files=RecordingFiles(folder, log), filesystem="ext4"
    )
    for key in (KEPT, CHANGED):
        keeper.put(key, [OLD], durability=SYNCED)
    begin = len(log)
    WORKS[name][0](keeper)
    keeper.close()
    return log, begin


def cuts(log: list[Op], begin: int) -> Iterator[tuple[bool, dict[tuple[str, ...], bytes | None]]]:
    replay, seen = Replay(), set()
    for number, op in enumerate(log, 1):
        replay.apply(op)
        if number < begin:
            continue
        for variant in VARIANTS:
            tree = replay.tree(variant)
            told = number == len(log)
            known = hash((told, *sorted(tree.items())))
            if known not in seen:
                seen.add(known)
                yield told, tree


def test_power_cut_after_every_operation(name: str, tmp_path: Path) -> None:
    done = WORKS[name][1]
    log, begin = recorded(tmp_path / "recorded", name)
    count = 0
    for told, tree in cuts(log, begin):
        shutil.rmtree(tmp_path / "cut", ignore_errors=True)
        build(tree, tmp_path / "cut")
        with make(tmp_path / "cut" / "a" / "place") as keeper:
            check(keeper)
            assert done(keeper) or not told
            if not done(keeper):
                keeper.remove(["source"])
                WORKS[name][0](keeper)
            keeper.sweep()
        count += 1
    assert count > 2


def test_only_what_is_synced_reaches_the_device_before_it_is_told(
    tmp_path: Path, no_device: None
) -> None:
    """WRITTEN costs no sync, once the folders are there."""
    log: list[Op] = []
    with FolderKeeper(
        tmp_path / "place", files=RecordingFiles(tmp_path, log), filesystem="ext4"
    ) as keeper:
        keeper.put("first", [b"x"])
        del log[:]
        keeper.put("deep/second", [b"x"])
        keeper.put("first", [b"y"], replace=True)
        keeper.remove(["first"])
    assert not [op for op, _ in log if op.startswith("sync")]
