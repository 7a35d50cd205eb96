"""Four ways in which torch's distributed checkpoints load something wrong without a word.

Each is tried on our own: through ``Checkpointer``, from the memory of a running training to that of
the next.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from sapwood.errors import CheckpointError
from sapwood.testing import faults
from sapwood.tiers.spec import TierSpec
from tests.checkpoint.killing import ON_DISK, checkpointer
from tests.checkpoint.training import Training, same

State = dict[str, torch.Tensor]
Damage = Callable[[Path, Path], None]
OPTIONS = {"engine": "sync", "keep": None, "every": None}


@pytest.fixture(params=ON_DISK)
def tier(request: pytest.FixtureRequest) -> str:
    """The only tier there is, so that no other can help out."""
    return str(request.param)


def train(folder: Path, tier: str, *steps: int) -> list[State]:
    """Save these steps; the states they were in."""
    training = Training(folder)
    states = []
    with checkpointer(training, folder, (tier,), **OPTIONS) as c:
        c.restore_latest()
        for step in steps:
            training.steps(step)
            states.append(training.state())
            c.save()
    training.close()
    return states


class Restored:
    """A training, other than the saved one, in which a restore was tried."""

    def __init__(self, folder: Path, tier: str, step: int | None = None) -> None:
        training = Training(folder)
        torch.manual_seed(77)
        self.before, self.step, self.error = training.state(), -1, ""
        self.skipped: tuple[str, ...] = ()
        with checkpointer(training, folder, (tier,), **OPTIONS) as c:
            try:
                loaded = c.restore_latest() if step is None else c.restore(step)
                if loaded is not None:
                    self.step, self.skipped = loaded.id.step, loaded.skipped
            except CheckpointError as error:
                self.error = str(error)
        self.state = training.state()
        training.close()


def home(folder: Path, tier: str, step: int) -> Path:
    places = folder / "ckpts" / "nodes" if tier == "local" else folder / "ckpts"
    (found,) = places.rglob(f"{step:08d}-*")
    return found


# -- A: torch's writer overwrites; when it dies, new values are loaded under the old name ----------


def save_again(folder: Path, tier: str, at: int) -> tuple[State, bool, bool]:
    """Save step 3 with other values, failing at a file operation.

    The state, whether the operation was come to, and whether the save was told to be durable.
    """
    training = Training(folder)
    torch.manual_seed(5)  # other values are dropped out, so it is another step 3
    training.steps(3)
    specs = (TierSpec(kind=tier, retries=0),)
    with checkpointer(training, folder, specs, **OPTIONS) as c:
        with faults.inject("files", "raise", at=at) as fault:
            report = c.save()
            c.wait()
        reached = fault.seen >= at
    state = training.state()
    training.close()
    return state, reached, tier in report.durable


def test_a_step_saved_again_replaces_nothing_until_it_is_whole(tmp_path: Path, tier: str) -> None:
    (old,) = train(tmp_path / "first", tier, 3)
    seen, at, reached = set(), 0, True
    while reached:
        at += 1
        folder = tmp_path / str(at)
        shutil.copytree(tmp_path / "first" / "ckpts", folder / "ckpts")
        new, reached, durable = save_again(folder, tier, at)
        assert not same(old, new)
        found = Restored(folder, tier)
        is_old, is_new = same(found.state, old), same(found.state, new)
        assert is_old or is_new, f"a mix, after operation {at} failed"
        assert is_new or not durable
        seen.add(is_new)
    assert seen == {False, True}
    assert at > 10


# -- B, C, D: its reader takes bytes of another save, changed bytes, and other lengths -------------


def first_half_of_old(new: Path, old: Path) -> None:
    content, other = new.read_bytes(), old.read_bytes()
    half = len(content) // 2
    new.write_bytes(other[:half] + content[half:])


def last_half_of_old(new: Path, old: Path) -> None:
    content, other = new.read_bytes(), old.read_bytes()
    half = len(content) // 2
    new.write_bytes(content[:half] + other[half:])


def all_of_old(new: Path, old: Path) -> None:
    new.write_bytes(old.read_bytes())


def truncated(new: Path, old: Path) -> None:
    os.truncate(new, new.stat().st_size // 2)


def longer(new: Path, old: Path) -> None:
    new.write_bytes(new.read_bytes() + b"more")


def emptied(new: Path, old: Path) -> None:
    new.write_bytes(b"")


def removed(new: Path, old: Path) -> None:
    new.unlink()


def flipped(where: float) -> Damage:
    def flip(new: Path, old: Path) -> None:
        content = bytearray(new.read_bytes())
        content[int(where * len(content))] ^= 0x40
        new.write_bytes(content)

    return flip


DAMAGES: dict[str, Damage] = {
    "first half of another save": first_half_of_old,
    "last half of another save": last_half_of_old,
    "all of another save": all_of_old,
    "truncated": truncated,
    "longer": longer,
    "emptied": emptied,
    "removed": removed,
    **{f"bit flipped at {where:g}": flipped(where) for where in (0.0, 0.25, 0.5, 0.75, 0.999)},
}


# A flipped bit may be one between two tensors; a bit of each tensor has a test of its own.
HARMLESS = {"longer", *(name for name in DAMAGES if "bit" in name)}
DATA = (".bin", ".safetensors")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, list[State]]]:
    """Steps 2 and 4, in each tier."""
    folder = tmp_path_factory.mktemp("saved")
    return {t: (folder / t / "ckpts", train(folder / t, t, 2, 4)) for t in ON_DISK}


@pytest.mark.parametrize("damage", list(DAMAGES))
def test_whatever_became_of_a_file_no_mix_is_loaded(
    tmp_path: Path, saved: dict[str, tuple[Path, list[State]]], tier: str, damage: str
) -> None:
    """Either the step comes back as it was, or all goes back to the one before, and says why."""
    template, (older, newer) = saved[tier]
    names = sorted(p.name for p in home(template.parent, tier, 4).iterdir())
    assert len(names) >= 2
    fell_back = []
    for name in names:
        folder = tmp_path / name
        shutil.copytree(template, folder / "ckpts")
        DAMAGES[damage](home(folder, tier, 4) / name, home(folder, tier, 2) / name)
        found = Restored(folder, tier)
        assert (found.step, found.error) in ((2, ""), (4, ""))
        if found.step == 4:
            assert same(found.state, newer)
            continue
        fell_back.append(name)
        assert same(found.state, older)
        # A shard without a record is one whose save has not come to its end.
        unknown = damage == "removed" and name == "shard-0.json"
        assert unknown or any("00000004-" in note for note in found.skipped)
        insisted = Restored(folder, tier, step=4)
        assert insisted.error
        assert same(insisted.state, insisted.before), "touched by a restore that failed"
    assert damage in HARMLESS or set(fell_back) >= {n for n in names if n.endswith(DATA)}


def test_one_flipped_bit_in_any_tensor_is_noticed(
    tmp_path: Path, saved: dict[str, tuple[Path, list[State]]], tier: str
) -> None:
    """C. Also where a weight is still a weight: only a checksum can tell."""
    template, (older, newer) = saved[tier]
    shutil.copytree(template, tmp_path / "ckpts")
    files = [p for p in home(tmp_path, tier, 4).iterdir() if p.name.endswith(DATA)]
    tried = 0
    for name, tensor in newer.items():
        raw = tensor.contiguous().numpy().tobytes()
        for path in files:
            content = path.read_bytes()
            if len(raw) < 16 or content.count(raw) != 1:
                continue
            at = content.index(raw) + len(raw) // 2
            path.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
            found = Restored(tmp_path, tier)
            path.write_bytes(content)
            assert found.step == 2, name
            assert same(found.state, older)
            assert "do not match their checksum" in found.skipped[0]
            tried += 1
    assert tried > 20
    assert Restored(tmp_path, tier).step == 4


def test_nothing_is_touched_when_no_step_is_whole(tmp_path: Path, tier: str) -> None:
    train(tmp_path, tier, 2, 4)
    for step in (2, 4):
        for path in home(tmp_path, tier, step).iterdir():
            os.truncate(path, path.stat().st_size - 1)
    found = Restored(tmp_path, tier)
    assert "no checkpoint is whole (steps found: [2, 4])" in found.error
    assert same(found.state, found.before)
