"""Trainings that are killed at a chosen moment, and what must be true of those that come after."""

from __future__ import annotations

import gc
import logging
import os
import signal
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from sapwood.checkpoint.checkpointer import Checkpointer  # now, and not in every fork
from sapwood.tiers.spec import TierSpec
from tests.checkpoint.training import Training, same

TIERS = ("memory", "local", "external")
ON_DISK = ("local", "external")
EVERY, FIRST, SECOND, LAST = 2, 2, 4, 8
SETTINGS: dict[str, Any] = {"every": EVERY, "keep": 1, "mode": "lazy", "drain_timeout": 20.0}
State = dict[str, torch.Tensor]


class Reference:
    """An undisturbed training: the loss of each step, and the state after it."""

    def __init__(self, folder: Path) -> None:
        training = Training(folder)
        self.losses: list[float] = []
        self.states: list[State] = [training.state()]
        for _ in range(LAST):
            self.losses.append(training.step())
            self.states.append(training.state())
        training.close()


def checkpointer(
    training: Training, folder: Path, tiers: Sequence[str | TierSpec] = TIERS, **options: Any
) -> Checkpointer:
    return Checkpointer(training.run, folder / "ckpts", tiers=tiers, **{**SETTINGS, **options})


@contextmanager
def uncomplaining() -> Iterator[None]:
    """No warning but for what a restore passes over."""
    heard: list[str] = []

    class Ear(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            heard.append(record.getMessage())

    ear = Ear(logging.WARNING)
    logging.getLogger("sapwood").addHandler(ear)
    try:
        yield
    finally:
        logging.getLogger("sapwood").removeHandler(ear)
    complaints = [text for text in heard if not text.startswith("while restoring")]
    assert not complaints, complaints


def comes_back(folder: Path, reference: Reference, tiers: tuple[str, ...], **options: Any) -> int:
    """Restore from these tiers; the step, whose state must be the reference's, bit for bit."""
    training = Training(folder)
    torch.manual_seed(9)  # whatever it was, it must come back
    with checkpointer(training, folder, tiers, **options) as c:
        loaded = c.restore_latest()
        assert loaded is not None
        assert same(training.state(), reference.states[loaded.id.step])
    training.close()
    return loaded.id.step


def goes_on(folder: Path, reference: Reference, **options: Any) -> tuple[int, tuple[str, ...]]:
    """Restore and train to the end, saving; the step that came back, and what was passed over."""
    training = Training(folder)
    torch.manual_seed(9)
    with uncomplaining(), checkpointer(training, folder, **options) as c:
        loaded = c.restore_latest()
        assert loaded is not None
        step = loaded.id.step
        assert same(training.state(), reference.states[step])
        assert training.steps(LAST) == reference.losses[step:]
        assert same(training.state(), reference.states[LAST])
        c.wait()
        for save in c.stats.saves:
            assert set(save.durable) == set(TIERS)
            assert save.failed == {}
        assert [s.id.step for s in c.stats.saves] == list(range(step + EVERY, LAST + 1, EVERY))
        assert c.stats.skipped == []
    training.close()
    return step, loaded.skipped


def kept(folder: Path) -> dict[str, list[str]]:
    """What is in each tier on disk, told by names."""
    (local,) = (p for p in (folder / "ckpts" / "nodes").iterdir() if p.is_dir())
    places = {"local": local, "external": folder / "ckpts"}
    return {
        tier: sorted(p.name for p in place.iterdir() if p.name[0].isdigit())
        for tier, place in places.items()
    }


def forked(work: Callable[[Callable[[str], None]], object]) -> tuple[bool, list[str]]:
    """Run ``work`` in a fork of this process; whether it was killed, and what it had told.

    A fork costs a hundredth of a new interpreter with torch. It is sound only because this process
    has no other thread: neither a run nor a checkpointer was ever made in it.
    """
    assert len(list(Path("/proc/self/task").iterdir())) == 1
    gc.freeze()  # what is not looked at again is not copied
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        _child(lambda: work(lambda text: os.write(write, f"{text}\n".encode()) and None), write)
    os.close(write)
    with os.fdopen(read) as pipe:
        told = pipe.read()
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert status in (0, -signal.SIGKILL), told
    return status != 0, told.splitlines()


def _child(work: Callable[[], object], write: int) -> None:
    status = 1
    try:
        # What a process has written outlives it, synced or not; only power loss needs the device.
        gc.disable()
        os.fsync = lambda fd: None
        work()
        status = 0
    except BaseException:
        os.write(write, traceback.format_exc().encode()[-4000:])
    finally:
        os._exit(status)
