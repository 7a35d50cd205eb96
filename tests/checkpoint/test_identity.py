"""Which checkpoint is which: steps that are reached again, branches, and trainings side by side."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import sapwood
from sapwood.checkpoint import attempts
from sapwood.errors import CheckpointError
from sapwood.testing import ranks
from sapwood.tiers.digest import seal, unseal
from tests.checkpoint.training import Training, same

State = dict[str, torch.Tensor]


class Saved:
    """A training in a folder, with a checkpointer that saves every second step."""

    def __init__(self, folder: Path, **options: Any) -> None:
        self.training = Training(folder)
        settings = {"engine": "sync", "keep": None, "every": 2, "mode": "sharded", **options}
        self.ckpt = sapwood.Checkpointer(self.training.run, folder / "ckpts", **settings)

    def until(self, step: int, *, seed: int | None = None) -> State:
        """Train on; another seed drops out other values, and so makes another timeline."""
        if seed is not None:
            torch.manual_seed(seed)
        self.training.steps(step)
        return self.training.state()

    def __enter__(self) -> Saved:
        return self

    def __exit__(self, *_: object) -> None:
        self.ckpt.close()
        self.training.close()


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "ckpts").glob("0*"))


def steps(folder: Path, attempt: str) -> list[int]:
    return [int(name[:8]) for name in names(folder) if name.endswith(attempt)]


def latest(folder: Path, **options: Any) -> tuple[str, State, tuple[str, ...]]:
    with Saved(folder, **options) as again:
        found = again.ckpt.restore_latest()
        assert found is not None
        return str(found.id), again.training.state(), found.skipped


@pytest.fixture
def branched(tmp_path: Path) -> tuple[str, str]:
    """Steps 2 to 8 of attempt a, and then 6 of attempt b, which went back to 4."""
    with Saved(tmp_path) as one:
        one.until(8)
        a = one.ckpt.stats.saves[-1].id.attempt
        one.ckpt.restore(4)
        one.until(6, seed=5)
        b = one.ckpt.stats.saves[-1].id.attempt
    assert a != b
    return a, b


# -- a step that is reached again --------------------------------------------------------------


@pytest.mark.parametrize("engine", ["sync", "node"])
def test_a_step_that_is_reached_again_is_another_checkpoint(tmp_path: Path, engine: str) -> None:
    with Saved(tmp_path, engine=engine) as one:
        first = one.until(4)
        one.ckpt.restore(2)
        second = one.until(4, seed=5)
        report = one.ckpt.save()
        one.ckpt.wait()
        assert not same(first, second)
        assert not report.failed
        found = one.ckpt.restore_latest()
        assert found is not None
        assert found.id == report.id
        assert same(one.training.state(), second)
    assert len(steps(tmp_path, "")) == 3
    id, state, skipped = latest(tmp_path)
    assert (id, skipped) == (str(report.id), ())
    assert same(state, second)


def test_a_save_by_hand_of_a_step_that_is_reached_again(tmp_path: Path) -> None:
    with Saved(tmp_path, every=None) as one:
        one.until(2)
        one.ckpt.save()
        one.until(3)
        one.ckpt.save()
        one.ckpt.restore(2)
        state = one.until(3, seed=5)
        one.ckpt.save()
        assert len(one.ckpt.stats.saves) == 3
    assert same(latest(tmp_path)[1], state)


def go_back_and_on(folder: Path) -> tuple[State, State, str]:
    with Saved(folder, mode="lazy", engine="node") as one:
        one.until(6)
        one.ckpt.restore(2)
        state = one.until(6, seed=5)
    with Saved(folder) as again:
        found = again.ckpt.restore_latest()
        assert found is not None
        return state, again.training.state(), str(found.id)


def test_ranks_never_mix_two_timelines(tmp_path: Path) -> None:
    found = ranks.spawn(go_back_and_on, 2, tmp_path)
    assert len({id for _, _, id in found}) == 1
    for state, restored, _ in found:
        assert same(state, restored)


# -- branches ----------------------------------------------------------------------------------


def test_the_latest_is_that_of_the_current_branch(
    tmp_path: Path, branched: tuple[str, str]
) -> None:
    a, b = branched
    assert latest(tmp_path)[0] == f"00000006-{b}"
    for step, attempt in ((8, a), (4, a), (6, b)):
        with Saved(tmp_path) as one:
            found = one.ckpt.restore(step)
            assert (found.step, found.id.attempt) == (step, attempt)
            assert any("abandoned branch" in note for note in found.skipped) == (step == 8)


def test_an_id_names_one_checkpoint(tmp_path: Path, branched: tuple[str, str]) -> None:
    a, _ = branched
    with Saved(tmp_path) as one:
        assert one.ckpt.restore(f"00000006-{a}").id.attempt == a
        with pytest.raises(CheckpointError, match="expected a step, or an id"):
            one.ckpt.restore("six")


def test_an_older_checkpoint_of_the_branch_is_an_ancestors(
    tmp_path: Path, branched: tuple[str, str]
) -> None:
    a, b = branched
    (tmp_path / "ckpts" / f"00000006-{b}" / "model.safetensors").write_bytes(b"")
    id, _, skipped = latest(tmp_path)
    assert id == f"00000004-{a}"
    assert any(f"00000006-{b}" in note for note in skipped)


def test_where_the_current_branch_cannot_be_known_somebody_must_say(
    tmp_path: Path, branched: tuple[str, str]
) -> None:
    a, b = branched
    (tmp_path / "ckpts" / f"00000006-{b}" / "shard-0.json").write_bytes(b"damaged")
    with Saved(tmp_path) as one:
        with pytest.raises(CheckpointError, match=f"00000006-{b} cannot be read, so"):
            one.ckpt.restore_latest()
        assert one.ckpt.restore(f"00000004-{a}").step == 4


def test_a_restart_that_saved_nothing_changes_nothing(tmp_path: Path) -> None:
    with Saved(tmp_path) as one:
        one.until(8)
    with Saved(tmp_path) as one:
        one.ckpt.restore(4)
    assert latest(tmp_path)[0].startswith("00000008-")


def test_an_abandoned_branch_is_never_taken_silently(
    tmp_path: Path, branched: tuple[str, str]
) -> None:
    a, b = branched
    for name in (f"00000002-{a}", f"00000004-{a}", f"00000006-{b}"):
        (tmp_path / "ckpts" / name / "model.safetensors").write_bytes(b"")
    with Saved(tmp_path) as one:
        before = one.training.state()
        with pytest.raises(CheckpointError, match="no checkpoint is whole on the current") as error:
            one.ckpt.restore_latest()
        assert f'restore("00000008-{a}")' in str(error.value)
        assert f"attempt {b}, restored from 00000004-{a}" in str(error.value)
        assert same(one.training.state(), before)
        with pytest.raises(CheckpointError, match=rf"step 6 cannot .*00000006-{a}"):
            one.ckpt.restore(6)
        assert one.ckpt.restore(8).id.attempt == a


@pytest.mark.parametrize("restored", [True, False])
def test_the_order_of_attempts_survives_a_clock_that_is_set_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, restored: bool
) -> None:
    with Saved(tmp_path) as one:
        one.until(8)
    monkeypatch.setattr(attempts, "time", SimpleNamespace(time=lambda: 1000.0))
    with Saved(tmp_path) as one:
        if restored:
            one.ckpt.restore(4)
        one.until(6, seed=5)
        expected = str(one.ckpt.stats.saves[-1].id)
    assert latest(tmp_path)[0] == expected


# -- several trainings in one place ------------------------------------------------------------


def test_another_training_in_the_same_place_removes_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with Saved(tmp_path, keep=1) as one:
        one.until(6)
        a = one.ckpt.stats.saves[-1].id.attempt
    with caplog.at_level(logging.WARNING), Saved(tmp_path, keep=1) as other:
        other.until(8)
        b = other.ckpt.stats.saves[-1].id.attempt
    assert steps(tmp_path, a) == [6]
    assert steps(tmp_path, b) == [8]
    said = [r.getMessage() for r in caplog.records if "another training" in r.getMessage()]
    assert len(said) == 1
    assert f"00000006-{a}" in said[0]


def test_a_running_training_is_not_set_to_another_ones_state(tmp_path: Path) -> None:
    with Saved(tmp_path) as one:
        one.until(4)
    with Saved(tmp_path) as one:
        mine = one.ckpt.restore_latest()
        assert mine is not None
        with Saved(tmp_path) as other:
            other.until(6)
        again = one.ckpt.restore_latest()
        assert again is not None
        assert again.id == mine.id
        one.until(6)
        found = one.ckpt.restore_latest()
        assert found is not None
        assert found.id == one.ckpt.stats.saves[-1].id


def test_an_abandoned_branch_goes_when_the_current_one_has_passed_it(tmp_path: Path) -> None:
    with Saved(tmp_path, keep=3) as one:
        one.until(8)
        a = one.ckpt.stats.saves[-1].id.attempt
    assert steps(tmp_path, a) == [4, 6, 8]
    with Saved(tmp_path, keep=3) as one:
        one.ckpt.restore(4)
        one.until(6)
        b = one.ckpt.stats.saves[-1].id.attempt
    assert (steps(tmp_path, a), steps(tmp_path, b)) == ([4, 6, 8], [6])
    with Saved(tmp_path, keep=3) as one:
        one.ckpt.restore_latest()
        one.until(8)
        c = one.ckpt.stats.saves[-1].id.attempt
    assert [steps(tmp_path, name) for name in (a, b, c)] == [[4], [6], [8]]


def test_attempts_of_a_training_are_related_also_when_those_between_are_gone(
    tmp_path: Path,
) -> None:
    for until in (2, 4, 6, 8):
        with Saved(tmp_path, keep=1) as one:
            one.ckpt.restore_latest()
            one.until(until)
        assert len(names(tmp_path)) == 1


# -- records of older versions -----------------------------------------------------------------


def as_first_format(folder: Path) -> None:
    for path in (folder / "ckpts").glob("0*/shard-*.json"):
        body = json.loads(unseal(path.read_bytes(), "record"))
        del body["lineage"], body["catalog_digest"]
        path.write_bytes(seal(json.dumps({**body, "format": "sapwood-shard/1"}).encode()))


def test_checkpoints_of_older_versions_are_restored_and_belong_to_the_training(
    tmp_path: Path,
) -> None:
    with Saved(tmp_path) as one:
        one.until(2)
    with Saved(tmp_path) as one:
        one.ckpt.restore_latest()
        state = one.until(6)
    as_first_format(tmp_path)
    id, found, skipped = latest(tmp_path)
    assert same(found, state)
    assert skipped == ()
    with Saved(tmp_path, keep=2) as one:
        one.ckpt.restore_latest()
        one.until(8)
        new = one.ckpt.stats.saves[-1]
        assert str(new.lineage.parent) == id  # type: ignore[union-attr]
    assert names(tmp_path) == [id, str(new.id)]
    with Saved(tmp_path, keep=1) as one:  # from scratch, beside checkpoints of who knows what
        one.until(2)
    assert len(names(tmp_path)) == 3
