"""Kill -9 at every moment of cooling: every tensor is there, in one form or the other."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import sapwood.store
from sapwood.runtime import faults
from sapwood.testing import ranks
from sapwood.testing.outcome import failure
from tests.checkpoint.killing import forked
from tests.repository.test_cold import check_all, save_all, trained

POINTS = ("files", "catalog")
AT_ONCE = 2
Tell = Callable[[str], None]


def work(place: Path) -> None:
    with sapwood.store.open(place) as repo:
        repo.cool()
        repo.gc(quiet=0.0)


def moments(place: Path) -> int:
    seen = []

    def counted(tell: Tell) -> None:
        for name in POINTS:
            faults.arm(name, lambda **facts: seen.append(facts), at=None)
        work(place)
        tell(str(len(seen)))

    return int(forked(counted)[1][0])


def die(place: Path, at: int) -> None:
    left = [at]

    def passed(**_: object) -> None:
        left[0] -= 1
        if not left[0]:
            os.kill(os.getpid(), signal.SIGKILL)

    def dying(tell: Tell) -> None:
        for name in POINTS:
            faults.arm(name, passed, at=None)
        work(place)

    forked(dying)


def goes_on(place: Path) -> None:
    versions = trained(4, size=3000)
    with sapwood.store.open(place) as repo:
        check_all(repo, versions)
        repo.cool()
        repo.gc(quiet=0.0)
        check_all(repo, versions)
        known = {row.key for row in repo._backend.catalog.packs()}  # type: ignore[attr-defined]
    there = {str(p.relative_to(place)) for p in (place / "packs").rglob("*") if p.is_file()}
    assert there == known


def prepare(place: Path) -> None:
    def save(tell: Tell) -> None:
        with sapwood.store.open(place) as repo:
            save_all(repo, trained(4, size=3000))
            repo.flush()

    forked(save)


def matrix(folder: Path, part: int) -> int:
    prepare(folder / "saved")
    shutil.copytree(folder / "saved", folder / "count")
    count = moments(folder / "count")
    for at in range(1 + part, count + 1, AT_ONCE):
        place = folder / str(at)
        shutil.copytree(folder / "saved", place)
        die(place, at)
        try:
            forked(lambda tell, place=place: goes_on(place))  # type: ignore[misc]
        except AssertionError as error:
            raise AssertionError(f"killed at moment {at} of {count}: {error}") from error
        shutil.rmtree(place)
    return count


def test_killed_at_every_moment(tmp_path: Path) -> None:
    with ExitStack() as stack:
        groups = []
        for part in range(AT_ONCE):
            folder = tmp_path / str(part)
            folder.mkdir()
            groups.append(stack.enter_context(ranks.start(matrix, 1, folder, part)))
        outcomes = [one for group in groups for one in group.wait(120)]
    error = failure(outcomes)
    assert error is None, error
    assert [one.value > 10 for one in outcomes] == [True] * AT_ONCE
