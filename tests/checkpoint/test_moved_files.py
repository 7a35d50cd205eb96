"""Files that were moved by hand are sound bytes in the wrong place: damage, not a state."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

import sapwood
from sapwood.cli.main import main
from sapwood.testing import ranks
from tests.checkpoint.training import Training, same

STEPS = (2, 4, 6)
Move = Callable[[Path], None]


def train(folder: Path, tier: str) -> list[dict]:
    training = Training(folder)
    states = []
    with sapwood.Checkpointer(
        training.run, folder / "ckpts", tiers=(tier,), every=2, engine="sync", keep=None
    ):
        for step in STEPS:
            training.steps(step)
            states.append({k: v for k, v in training.state().items() if k != "random"})
    training.close()
    return states


@pytest.fixture(scope="module", params=["external", "local"])
def trained(request, tmp_path_factory) -> tuple[Path, str, list[dict]]:
    folder = tmp_path_factory.mktemp("moved")
    return folder, request.param, ranks.spawn(train, 2, folder, request.param)[0]


def home(place: Path, step: int) -> Path:
    (found,) = place.rglob(f"{step:08d}-*")
    return found


def rename_folder(place: Path) -> None:
    old = home(place, 4)
    shutil.rmtree(home(place, 6))
    old.rename(old.with_name(old.name.replace("00000004", "00000006")))


def swap_ranks(place: Path) -> None:
    folder = home(place, 6)
    for suffix in ("json", "bin"):
        one, other, spare = (folder / f"shard-{n}.{suffix}" for n in (0, 1, 2))
        if one.exists():
            one.rename(spare)
            other.rename(one)
            spare.rename(other)


def shard_of_another_step(place: Path) -> None:
    for path in home(place, 4).glob("shard-1.*"):
        shutil.copy(path, home(place, 6) / path.name)


@pytest.mark.parametrize("move", [rename_folder, swap_ranks, shard_of_another_step])
def test_what_was_moved_is_damaged(trained, tmp_path: Path, capsys, move: Move) -> None:
    source, tier, states = trained
    place = tmp_path / "ckpts"
    shutil.copytree(source / "ckpts", place)
    move(place)
    training = Training(tmp_path)
    with sapwood.Checkpointer(training.run, place, tiers=(tier,), engine="sync") as c:
        found = c.restore_latest()
        assert found is not None
        expected = 2 if move is rename_folder else 4
        assert found.step == expected
        assert any("files were moved" in note for note in found.skipped)
        state = training.state()
        assert same({k: state[k] for k in states[0]}, states[STEPS.index(expected)])
    training.close()
    assert main(["ckpt", "verify", "6", "--place", str(place)]) == 1
    assert "files were moved" in capsys.readouterr().out
    assert main(["ckpt", "ls", str(place)]) == 0
    assert "damaged" in capsys.readouterr().out


def test_a_renamed_draft_is_not_published(tmp_path: Path) -> None:
    train(tmp_path, "external")
    place = tmp_path / "ckpts"
    old = home(place, 4)
    (old / "manifest.json").unlink()
    old.rename(old.with_name(old.name.replace("00000004", "00000008") + ".partial"))
    main(["ckpt", "repair", str(place), "--yes", "--older", "0s"])
    assert not [path for path in place.glob("00000008-*") if not path.suffix]
