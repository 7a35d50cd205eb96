"""Kill -9, and every error a disk can give, at every single file operation of a tier."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sapwood.errors import TierError
from sapwood.runtime import faults as points
from sapwood.testing import faults
from sapwood.tiers.base import Stored, Tier
from sapwood.tiers.external import ExternalTier
from tests.storage.dying import dies, inside
from tests.tiers.crash import (
    KINDS,
    NEW,
    NEXT,
    OLD,
    WORLD,
    check,
    drafts,
    given,
    put_all,
    ranks_of,
    tier_in,
)

ERRORS = (errno.ENOSPC, errno.EIO, errno.EROFS)


@pytest.fixture(autouse=True)
def no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a process has written outlives it, synced or not; only power loss needs the device."""
    monkeypatch.setattr(os, "fsync", lambda fd: None)


class Scene:
    """A folder in a known state, again and again."""

    def __init__(self, kind: str, folder: Path, prepare: Callable[[Tier], object]) -> None:
        self.kind = kind
        self.template = folder / "template"
        self.folder = folder / "now"
        self.place = Path()
        prepare(tier_in(kind, self.template))

    def fresh(self) -> Tier:
        shutil.rmtree(self.folder, ignore_errors=True)
        shutil.copytree(self.template, self.folder)
        return self.tier()

    def tier(self) -> Tier:
        return tier_in(self.kind, self.folder / self.place)

    def killed(self, work: Callable[[Tier, Callable[[], None]], object]) -> Iterator[int]:
        """Let children die at the first, second, ... operation, until one survives.

        Gives how far each came.
        """
        at = 0
        alive = False
        while not alive:
            at += 1
            tier = self.fresh()
            killed, told = dies(lambda tell, tier=tier: work(tier, tell), at, self.folder)
            alive = not killed
            yield told
        assert at > 3, "no operation was passed"

    def failing(self, code: int, work: Callable[[Tier], object]) -> Iterator[Tier]:
        """Let the first, second, ... operation fail, until all have; each must be told."""

        def fail(**_: object) -> None:
            raise OSError(code, os.strerror(code))

        at = 0
        while True:
            at += 1
            tier = self.fresh()
            with faults.inject("files", fail, at=at, when=inside(self.folder)) as fault:
                if fault_free(lambda tier=tier: work(tier)):
                    assert fault.seen < at, f"operation {at} failed and nobody was told"
                    break
            yield tier
        assert at > 3, "no operation was passed"


def fault_free(work: Callable[[], object]) -> bool:
    try:
        work()
    except TierError:
        return False
    return True


@pytest.fixture(params=sorted(KINDS))
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def old(tier: Tier) -> None:
    put_all(tier, OLD)


def both(tier: Tier) -> None:
    put_all(tier, OLD)
    put_all(tier, NEW)


def is_clean(scene: Scene, *ids: object) -> None:
    assert sorted(p.name for p in scene.folder.iterdir()) == [str(id) for id in ids]
    assert drafts(scene.folder) == []


# -- put -------------------------------------------------------------------------------------


def test_put_killed_at_every_operation(kind: str, tmp_path: Path) -> None:
    scene = Scene(kind, tmp_path, old)
    came = []
    for told in scene.killed(lambda tier, tell: put_all(tier, NEW, lambda _: tell())):
        tier = scene.tier()
        check(tier, ranks_of(OLD) + ranks_of(NEW)[:told])
        put_all(tier, NEW)
        assert check(tier, ranks_of(OLD) + ranks_of(NEW)) == ranks_of(OLD) + ranks_of(NEW)
        is_clean(scene, OLD, NEW)
        came.append(told)
    assert set(came) == {0, 1, WORLD}


@pytest.mark.parametrize("code", ERRORS)
def test_put_with_every_operation_failing(kind: str, tmp_path: Path, code: int) -> None:
    scene = Scene(kind, tmp_path, old)
    for tier in scene.failing(code, lambda tier: put_all(tier, NEW)):
        check(tier, ranks_of(OLD))
        assert drafts(scene.folder) == []
        put_all(tier, NEW)
        check(tier, ranks_of(OLD) + ranks_of(NEW))
        is_clean(scene, OLD, NEW)


def test_put_into_a_new_folder(kind: str, tmp_path: Path) -> None:
    scene = Scene(kind, tmp_path, lambda tier: tier.folder.mkdir())
    scene.place = Path("a", "b")
    for told in scene.killed(lambda tier, tell: put_all(tier, NEW, lambda _: tell())):
        tier = scene.tier()
        check(tier, ranks_of(NEW)[:told])
        put_all(tier, NEW)
        check(tier, ranks_of(NEW))


def test_putting_again_killed_at_every_operation(kind: str, tmp_path: Path) -> None:
    scene = Scene(kind, tmp_path, both)
    for _ in scene.killed(lambda tier, tell: put_all(tier, NEW)):
        check(scene.tier(), ranks_of(OLD) + ranks_of(NEW))


def test_putting_again_after_what_is_referenced_was_dropped(tmp_path: Path) -> None:
    scene = Scene("linked", tmp_path, lambda tier: (both(tier), tier.drop(OLD)))
    assert list(scene.template.rglob("*.base-*"))
    for _ in scene.killed(lambda tier, tell: put_all(tier, NEW)):
        check(scene.tier(), ranks_of(NEW))


def test_a_chain_of_references_killed_at_every_operation(tmp_path: Path) -> None:
    scene = Scene("linked", tmp_path, both)

    def work(tier: Tier, tell: Callable[[], None]) -> None:
        put_all(tier, NEXT, lambda _: tell())
        tier.drop(OLD)
        tier.drop(NEW)

    for told in scene.killed(work):
        tier = scene.tier()
        check(tier, ranks_of(NEXT)[:told] if told == WORLD else ranks_of(OLD) + ranks_of(NEW))
        put_all(tier, NEXT)
        tier.drop(OLD)
        tier.drop(NEW)
        assert check(tier, ranks_of(NEXT)) == ranks_of(NEXT)
        is_clean(scene, NEXT)


# -- drop ------------------------------------------------------------------------------------


def test_drop_killed_at_every_operation(kind: str, tmp_path: Path) -> None:
    scene = Scene(kind, tmp_path, both)
    for _ in scene.killed(lambda tier, tell: tier.drop(OLD)):
        tier = scene.tier()
        check(tier, ranks_of(NEW))
        tier.drop(OLD)
        is_clean(scene, NEW)
        check(tier, ranks_of(NEW))


@pytest.mark.parametrize("code", ERRORS)
def test_drop_with_every_operation_failing(kind: str, tmp_path: Path, code: int) -> None:
    scene = Scene(kind, tmp_path, both)
    for tier in scene.failing(code, lambda tier: tier.drop(OLD)):
        check(tier, ranks_of(NEW))
        tier.drop(OLD)
        is_clean(scene, NEW)


def test_a_removal_that_ends_half_way_leaves_nothing_that_seems_whole(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Inside the one operation that removes a folder: after each single file."""
    scene = Scene(kind, tmp_path, both)
    unlink = os.unlink
    for at in range(1, 5):
        tier = scene.fresh()
        left = [at]

        def failing(*args: object, left: list[int] = left, **options: object) -> None:
            left[0] -= 1
            if left[0] == 0:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            unlink(*args, **options)  # type: ignore[arg-type]

        with monkeypatch.context() as patch:
            patch.setattr(os, "unlink", failing)
            with pytest.raises(TierError, match="cannot remove"):
                tier.drop(OLD)
        check(tier, ranks_of(NEW))
        tier.drop(OLD)
        is_clean(scene, NEW)


# -- finish ----------------------------------------------------------------------------------


def unfinished(tier: Tier) -> None:
    """An old checkpoint, and a new one of which only the last step is missing."""
    assert isinstance(tier, ExternalTier)
    put_all(tier, OLD)
    with (
        faults.inject("files", "raise", when=lambda path, **_: path == tier.folder / NEW.folder),
        pytest.raises(points.InjectedError),
    ):
        put_all(tier, NEW)


def test_finish_killed_at_every_operation(tmp_path: Path) -> None:
    scene = Scene("external", tmp_path, unfinished)
    for _ in scene.killed(lambda tier, tell: tier.finish_all()):
        tier = ExternalTier(scene.folder)
        everything = ranks_of(OLD) + ranks_of(NEW)
        check(tier, everything)
        tier.finish_all()
        assert tier.finish(NEW)
        assert check(tier, everything) == everything
        assert sorted(p.name for p in scene.folder.iterdir()) == [str(OLD), str(NEW)]


@pytest.mark.parametrize("code", ERRORS)
def test_finish_with_every_operation_failing(tmp_path: Path, code: int) -> None:
    scene = Scene("external", tmp_path, unfinished)
    for tier in scene.failing(code, lambda tier: tier.finish(NEW)):
        check(tier, ranks_of(OLD) + ranks_of(NEW))
        assert drafts(scene.folder) == []
        assert tier.finish(NEW)
        is_clean(scene, OLD, NEW)


def test_one_rank_dies_at_every_operation_while_the_other_is_done(tmp_path: Path) -> None:
    """The dead rank's engine comes back as another process; the other never writes again."""
    scene = Scene("external", tmp_path, lambda tier: tier.put(*given(NEW, 0)))
    for told in scene.killed(lambda tier, tell: (tier.put(*given(NEW, 1)), tell())):
        tier = ExternalTier(scene.folder)
        check(tier, [Stored(NEW, 0), Stored(NEW, 1)][: 1 + told])
        tier.put(*given(NEW, 1))
        check(tier, ranks_of(NEW))
        is_clean(scene, NEW)
