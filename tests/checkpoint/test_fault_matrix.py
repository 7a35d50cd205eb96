"""Kill -9 at every file operation of a save, through the ``Checkpointer``.

The second of two saves is killed; with ``keep=1`` its operations include those that remove the
first. Always the newest state that is whole comes back, bit for bit, and the run goes on saving.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from sapwood.checkpoint.engine.node import NodeEngine
from sapwood.runtime import faults
from sapwood.testing import ranks
from sapwood.testing.faults import env
from sapwood.testing.outcome import failure
from tests.checkpoint.engines import see_end
from tests.checkpoint.killing import (
    FIRST,
    LAST,
    ON_DISK,
    SECOND,
    TIERS,
    Reference,
    checkpointer,
    comes_back,
    forked,
    goes_on,
    kept,
)
from tests.checkpoint.training import Training, same

Tell = Callable[[str], None]
Operation = tuple[str, str, int]
"""What it does, to which path below the run's folder, and for the how-manieth time."""
ENV = {"SAPWOOD_NODE": "n0", "SAPWOOD_CHECKPOINT_LINGER": "0.2"}
AT_ONCE = 2
GO_ON_EVERY = 4
"""After every n-th death of an engine its training lives on; after the others it dies too."""


def reference_of(folder: Path) -> Reference:
    """Made in another process: this one must stay without threads."""
    killed, _ = forked(lambda tell: torch.save(vars(Reference(folder)), folder / "reference.pt"))
    assert not killed
    found = Reference.__new__(Reference)
    vars(found).update(torch.load(folder / "reference.pt"))
    return found


# -- which operations there are --------------------------------------------------------------


def record(folder: Path) -> list[Operation]:
    def work(tell: Tell) -> None:
        seen: Counter[tuple[str, str]] = Counter()
        second: list[Operation] = []
        training = start(folder)

        def note(op: str, path: Path) -> None:
            if folder in path.parents:
                key = op, str(path.relative_to(folder))
                seen[key] += 1
                if training.run.step_count >= SECOND - 1:
                    second.append((*key, seen[key]))

        faults.arm("files", note, at=None)
        c = checkpointer(training, folder, engine="sync")
        training.steps(SECOND - 1)
        c.wait()
        second.clear()
        training.steps(SECOND)
        c.close()
        training.close()
        tell(json.dumps(second))

    killed, (told,) = forked(work)
    assert not killed
    return [(op, path, n) for op, path, n in json.loads(told)]


@pytest.fixture(scope="module")
def operations(tmp_path_factory: pytest.TempPathFactory) -> list[Operation]:
    folder = tmp_path_factory.mktemp("record")
    (found,) = ranks.spawn(record, 1, folder, env=ENV)
    assert {op for op, _, _ in found} >= {
        "make_folder", "create", "share", "resize", "write", "sync",
        "publish", "sync_folder", "remove", "remove_tree",
    }  # fmt: skip
    return list(found)


# -- dying there -----------------------------------------------------------------------------


def start(folder: Path) -> Training:
    # An attempt's name is otherwise by chance, and its operations could not be told again.
    secrets.token_hex = lambda nbytes=16: "5a" * nbytes  # type: ignore[assignment]
    faults.disarm_all()
    return Training(folder)


def durable(tell: Tell) -> Callable[..., None]:
    return lambda report, tier: tell(f"durable {report.id.step} {tier}")


def rank_dies(place: Path, operation: Operation, tell: Tell) -> None:
    """``engine="sync"``: the rank does the file work, and dies of it."""
    training = start(place)
    op, path, n = operation
    when = lambda **facts: (facts["op"], facts["path"]) == (op, place / path)  # noqa: E731
    faults.arm("files", "kill", at=n, when=when)
    c = checkpointer(training, place, engine="sync", on_durable=durable(tell))
    training.steps(SECOND - 1)
    c.wait()
    training.steps(SECOND)
    c.close()
    raise AssertionError(f"came to its end without {operation}")


def engine_dies(
    place: Path, operation: Operation, tell: Tell, reference: Reference | None = None
) -> None:
    """``engine="node"``: the engine does, and the rank dies with it, unless there is a reference.

    Then it goes on, and what was left at that moment is put aside.
    """
    training = start(place)
    op, path, n = operation
    os.environ |= env(f"files:kill@{n}[op={op},path={place / path}]")  # for the engine
    c = checkpointer(training, place, engine="node", on_durable=durable(tell))
    del os.environ[faults.ENV]
    assert isinstance(c._engine, NodeEngine)
    pid = c._engine.pid
    losses = training.steps(SECOND - 1)
    c.wait()
    losses += training.steps(SECOND)
    see_end(pid)
    if reference is None:
        os.kill(os.getpid(), signal.SIGKILL)
        return
    tell("engine died")
    shutil.copytree(place / "ckpts", place / "then" / "ckpts")
    assert losses + training.steps(LAST) == reference.losses
    assert same(training.state(), reference.states[LAST])
    c.wait()
    last = c.stats.saves[-1]
    assert (last.id.step, set(last.durable)) == (LAST, set(TIERS))
    c.close()
    training.close()


def what_is_left(place: Path, reference: Reference, told: list[str]) -> None:
    """Each tier on disk has a whole checkpoint; the newest there is comes back, and all goes on."""
    found = {tier: comes_back(place, reference, (tier,), engine="sync") for tier in ON_DISK}
    for tier, step in found.items():
        assert step in (FIRST, SECOND)
        assert step == SECOND or f"durable {SECOND} {tier}" not in told
    assert goes_on(place, reference, engine="sync")[0] == max(found.values())
    for tier, names in kept(place).items():
        assert [name[:8] for name in names] == [f"{LAST:08d}"], f"{tier} has {names}"


def at_one(place: Path, engine: str, operation: Operation, reference: Reference) -> None:
    """The rank, or the engine with its rank, dies."""
    dies = rank_dies if engine == "sync" else engine_dies
    killed, told = forked(lambda tell: dies(place, operation, tell))
    assert killed
    forked(lambda tell: what_is_left(place, reference, told))


def at_one_alone(place: Path, operation: Operation, reference: Reference) -> None:
    """The engine dies, and its rank goes on."""
    killed, told = forked(lambda tell: engine_dies(place, operation, tell, reference))
    assert not killed
    told = told[: told.index("engine died")]
    forked(lambda tell: what_is_left(place / "then", reference, told))
    forked(lambda tell: what_it_saved(place, reference))


def what_it_saved(place: Path, reference: Reference) -> None:
    assert comes_back(place, reference, TIERS, engine="sync") == LAST


def matrix(folder: Path, engine: str, operations: list[Operation]) -> int:
    """Die at each of these operations; how many there were."""
    reference = reference_of(folder)
    for number, operation in enumerate(operations):
        place = folder / str(number)
        try:
            if engine == "node" and number % GO_ON_EVERY == 0:
                at_one_alone(place, operation, reference)
            else:
                at_one(place, engine, operation, reference)
        except AssertionError as error:
            raise AssertionError(f"killed at {operation}: {error}") from error
        shutil.rmtree(place)
    return len(operations)


@pytest.mark.parametrize("engine", ["sync", "node"])
def test_killed_at_every_file_operation_of_a_save(
    tmp_path: Path, operations: list[Operation], engine: str
) -> None:
    groups = []
    with ExitStack() as stack:
        for part in range(AT_ONCE):
            folder = tmp_path / str(part)
            folder.mkdir()
            some = operations[part::AT_ONCE]
            groups.append(
                stack.enter_context(ranks.start(matrix, 1, folder, engine, some, env=ENV))
            )
        outcomes = [one for group in groups for one in group.wait(100)]
        error = failure(outcomes)
        assert error is None, error
        assert sum(one.value for one in outcomes) == len(operations)
