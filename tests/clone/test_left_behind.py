"""What forks cost donors besides sending: what is kept of one that is over, and what is asked."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from sapwood.clone.board import Board
from sapwood.clone.remote import RemoteBoard
from sapwood.testing import ranks
from tests.clone.forking import begin, home_of, order, receive, until
from tests.clone.forking import digest as digest_of

STEPS = 30


def count_asking(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the training's thread asks the board for, on whichever side of it this rank is."""
    asked: list[str] = []

    def spy(kind: type, name: str) -> None:
        real = getattr(kind, name)

        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            if threading.current_thread() is threading.main_thread():
                asked.append(name)
            return real(self, *args, **kwargs)

        monkeypatch.setattr(kind, name, call)

    spy(RemoteBoard, "_ask")
    for name in ("get", "set", "add", "compare_set", "wait_any"):
        spy(Board, name)
    return asked


def donate_to_a_standby(folder: Path) -> dict[str, Any]:
    """Train while a clone stands by, let it begin, and see what is left when it has."""
    with pytest.MonkeyPatch.context() as patch:
        training = begin(folder, "adamw")
        run = training.run
        run.allow_clones()
        asked = count_asking(patch)
        ranks.mark("open")
        until(lambda: run.forks, "a fork")
        states, losses = {}, {}

        def step() -> None:
            losses[run.step_count + 1] = training.step()
            states[run.step_count] = digest_of(training.state())

        board = run._donor._board
        posted = f"fork/{run._donor._sessions[0]._session.name}/posted"
        step()  # the donors look at their model when a step has ended
        until(lambda: board.wait_any([posted], 0.05), "clones that stand by")
        asked.clear()
        for _ in range(STEPS):
            step()
        while_standing_by = list(asked)
        run.start_standbys()
        while run.group.share_text("done", str(run.forks[0].sent)) != "True":
            step()
        until(lambda: run.forks[0].done, "clones to begin")
        for _ in range(10):
            step()
        until(lambda: run._donor._sessions[0]._thread.is_alive() is False, "the fork to be over")
        kept = board.nbytes if isinstance(board, Board) else 0
        training.close()
    return {"asked": while_standing_by, "kept": kept, "states": states, "losses": losses}


def test_a_clone_that_stands_by_is_not_asked_about_and_leaves_little(tmp_path: Path) -> None:
    with ranks.start(donate_to_a_standby, 2, tmp_path) as group:
        for rank in range(2):
            group.wait_mark("open", rank=rank, timeout=60)
        env = order(home_of(tmp_path), standby=True)
        (clone,) = ranks.spawn(receive, 1, tmp_path / "clone", env=env)
        seen = [outcome.value for outcome in group.wait(timeout=60)]
    # One that learns a step late that clones stand by asks once, and not in each of the steps.
    assert all(len(donor["asked"]) <= 1 for donor in seen), [donor["asked"] for donor in seen]
    assert seen[0]["kept"] < 200, "rank 0 keeps more of a fork that is over than its last words"
    assert clone["first"] in seen[0]["states"].values()
