"""Power cut after every single file operation: nothing promised is lost, nothing false is told."""

from __future__ import annotations

import errno
import os
import random
import shutil
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from sapwood.errors import TierError
from sapwood.testing import faults
from sapwood.tiers.base import Stored
from sapwood.tiers.record import CheckpointId
from tests.storage.dying import inside
from tests.storage.power import VARIANTS, Op, RecordingFiles, Replay, build
from tests.tiers.crash import KINDS, NEW, NEXT, OLD, WORLD, check, given, put_all, ranks_of, tier_in

PLACE = Path("a", "b")
"""Where the tier is in the recorded folder: it makes both."""


@pytest.fixture(autouse=True)
def no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which bytes are safe is what the replay works out."""
    monkeypatch.setattr(os, "fsync", lambda fd: None)


@pytest.fixture(params=sorted(KINDS))
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


class Life:
    """Tiers on recorded files, and a log with what was promised in between."""

    def __init__(self, kind: str, folder: Path, files: type[RecordingFiles] = RecordingFiles):
        self.kind = kind
        self.root = folder / "recorded"
        self.root.mkdir()
        self.log: list[Op] = []
        self._files = files
        self.tier = self.engine()

    def engine(self):  # type: ignore[no-untyped-def]
        """A tier as one more process would have it."""
        return tier_in(self.kind, self.root / PLACE, self._files(self.root, self.log))

    def put(self, id: CheckpointId) -> None:
        put_all(self.tier, id, self.promise)

    def promise(self, stored: Stored) -> None:
        self.log.append(("promise", (stored,)))

    def drop(self, id: CheckpointId) -> None:
        self.log.append(("dropping", (id,)))
        self.tier.drop(id)
        self.log.append(("dropped", (id,)))


class Cuts:
    """What a log leaves behind, wherever it is cut."""

    def __init__(self, life: Life, folder: Path) -> None:
        self.life = life
        self.folder = folder / "cut"
        self._replay = Replay()
        self._promised: set[Stored] = set()
        self._gone: set[CheckpointId] = set()
        self._seen: set[int] = set()

    def everywhere(self) -> int:
        """Cut after each operation; how many different trees that gave."""
        for op in self.life.log:
            self.apply(op)
            self.here()
        return len(self._seen)

    def at_the_end(self) -> None:
        for op in self.life.log:
            self.apply(op)
        self.here()

    def apply(self, op: Op) -> None:
        if op[0] == "promise":
            self._promised.add(op[1][0])
        elif op[0] == "dropping":
            self._promised = {s for s in self._promised if s.id != op[1][0]}
        elif op[0] == "dropped":
            self._gone.add(op[1][0])
        else:
            self._replay.apply(op)

    def here(self) -> None:
        for variant in VARIANTS:
            tree = self._replay.tree(variant)
            known = hash((*sorted(tree.items()), *self._promised, *self._gone))
            if known not in self._seen:
                self._seen.add(known)
                self._look(variant, tree)

    def _look(self, variant: str, tree: dict[tuple[str, ...], bytes | None]) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        build(tree, self.folder)
        tier = tier_in(self.life.kind, self.folder / PLACE)
        try:
            listed = check(tier, self._promised)
            assert not {s.id for s in listed} & self._gone, "a dropped checkpoint is back"
            put_all(tier, NEW)  # whatever is there, the next try is the last one
            check(tier, ranks_of(NEW))
        except Exception as error:
            raise AssertionError(f"{variant}: {error!r}\n{sorted(tree)}") from error


def test_a_whole_life(kind: str, tmp_path: Path) -> None:
    life = Life(kind, tmp_path)
    life.put(OLD)
    life.put(NEW)
    life.drop(OLD)
    assert Cuts(life, tmp_path).everywhere() > 50


def test_references_are_taken_and_every_cut_of_a_chain_of_them_is_sound(tmp_path: Path) -> None:
    life = Life("linked", tmp_path)
    for id in (OLD, NEW, NEXT):
        life.put(id)
    life.drop(OLD)
    life.drop(NEW)
    assert sum(op == "link" for op, _ in life.log) == 2 * WORLD
    Cuts(life, tmp_path).everywhere()


@pytest.mark.parametrize("seed", range(6))
def test_two_ranks_at_once(kind: str, tmp_path: Path, seed: int) -> None:
    life = Life(kind, tmp_path)
    if kind == "linked":
        life.put(OLD)
    turns = Turns(WORLD, seed)

    def put(stored: Stored) -> None:
        turns.begin(stored.rank)
        try:
            tier = life.engine()
            tier.put(*given(NEW, stored.rank, tier))
            life.promise(stored)
        finally:
            turns.end()

    with (
        faults.inject("files", lambda **_: turns.next(), at=None),
        ThreadPoolExecutor(WORLD) as pool,
    ):
        for done in [pool.submit(put, stored) for stored in ranks_of(NEW)]:
            done.result(60)
    Cuts(life, tmp_path).everywhere()


class Turns:
    """One thread runs at a time; at each file operation chance says which one goes on."""

    def __init__(self, count: int, seed: int) -> None:
        self._chance = random.Random(seed)
        self._changed = threading.Condition()
        self._mine = threading.local()
        self._waiting: set[int] = set()
        self._alive = count
        self._turn: int | None = None

    def begin(self, number: int) -> None:
        self._mine.number = number
        self.next()

    def next(self) -> None:
        me = self._mine.number
        with self._changed:
            self._waiting.add(me)
            self._give()
            assert self._changed.wait_for(lambda: self._turn == me, 30)
            self._waiting.discard(me)

    def end(self) -> None:
        with self._changed:
            self._alive -= 1
            self._give()

    def _give(self) -> None:
        self._turn = None
        if self._waiting and len(self._waiting) == self._alive:
            self._turn = self._chance.choice(sorted(self._waiting))
        self._changed.notify_all()


def test_a_call_that_failed_is_not_taken_for_done(kind: str, tmp_path: Path) -> None:
    """After an error at any operation the retry must sync again all that was not synced."""

    def fail(**_: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    failed, at = True, 0
    while failed:
        at += 1
        folder = tmp_path / str(at)
        folder.mkdir()
        life = Life(kind, folder)
        with faults.inject("files", fail, at=at, when=inside(folder)):
            try:
                put_all(life.tier, NEW)
                failed = False
            except TierError:
                pass
        life.put(NEW)
        Cuts(life, folder).at_the_end()
        shutil.rmtree(folder)
    assert at > 10


# -- the replay itself -----------------------------------------------------------------------


class NoFolderSync(RecordingFiles):
    """Forgets that names must be synced."""

    def sync_folder(self, path: Path) -> None:
        pass


class NoFileSync(RecordingFiles):
    """Forgets that bytes must be synced."""

    def _writer(self, *args: object, **options: object):  # type: ignore[no-untyped-def]
        writer = super()._writer(*args, **options)  # type: ignore[arg-type]
        writer.sync = lambda: None
        return writer


def forgetful(skip: Callable[[Path], bool]) -> type[RecordingFiles]:
    """Forgets one kind of folder."""

    class Forgetful(RecordingFiles):
        def sync_folder(self, path: Path) -> None:
            if not skip(path):
                super().sync_folder(path)

    return Forgetful


@pytest.mark.parametrize(
    "files",
    [
        NoFolderSync,
        NoFileSync,
        forgetful(lambda path: path.name == "b"),
        forgetful(lambda path: path.name == "a"),
        forgetful(lambda path: path.name.startswith("0")),
    ],
    ids=["no folder sync", "no file sync", "not the tier", "not above it", "not the checkpoint"],
)
def test_every_forgotten_sync_is_found(
    kind: str, tmp_path: Path, files: type[RecordingFiles]
) -> None:
    life = Life(kind, tmp_path, files)
    life.put(OLD)
    life.put(NEW)
    life.drop(OLD)
    with pytest.raises(AssertionError, match=r"lost|damaged|cannot|is back|bytes"):
        Cuts(life, tmp_path).everywhere()
