"""Behind workers of a DataLoader: each loop is the next epoch, and nothing is silently repeated."""

from __future__ import annotations

import gc
import logging
import multiprocessing
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from sapwood.data import Batch, LmdbReader, LmdbRecords
from sapwood.errors import ConfigError, DataError, UsageError
from tests.data.databases import numbered, plain

BATCHES = 12
STATEFUL = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    made = tmp_path / "a.mdb"
    plain(made, numbered(230, lambda n: 60))
    return made


def numbers_of(batch: Batch) -> torch.Tensor:
    return torch.from_numpy(batch.index.copy())


def reader(path: Path, **options: Any) -> LmdbReader:
    settings: dict[str, Any] = {"seed": 2, "decode": numbers_of, "streams": 4, "window": 4000}
    return LmdbReader(path, 20, chunk=4096, **(settings | options))


def rows(batches: Any) -> list[list[int]]:
    return [batch.tolist() for batch in batches]


def epochs_of(path: Path, count: int) -> list[list[list[int]]]:
    whole = rows(reader(path, epochs=count))
    return [whole[n * BATCHES : (n + 1) * BATCHES] for n in range(count)]


def loader(of: Any, workers: int = 2, start: str = "fork", **options: Any) -> Any:
    return DataLoader(
        of, batch_size=None, num_workers=workers, multiprocessing_context=start, **options
    )


@pytest.mark.parametrize("start", ["fork", "forkserver"])
@pytest.mark.parametrize("persistent", [False, True])
def test_each_loop_is_the_next_epoch(path: Path, start: str, persistent: bool) -> None:
    expected = epochs_of(path, 3)
    loops = loader(reader(path), start=start, persistent_workers=persistent)
    assert [rows(loops) for _ in range(3)] == expected


def test_two_epochs_in_each_loop(path: Path) -> None:
    whole = rows(reader(path, epochs=4))
    loops = loader(reader(path, epochs=2), workers=1)
    assert rows(loops) + rows(loops) == whole


def test_torch_seeded_in_each_epoch(path: Path) -> None:
    """A DataLoader then draws the same seed for its workers each time."""
    found, loops = [], loader(reader(path))
    for _ in range(3):
        torch.manual_seed(5)
        found.append(rows(loops))
    assert found == epochs_of(path, 3)


@pytest.mark.parametrize("start", ["fork", "forkserver"])
@pytest.mark.parametrize("persistent", [False, True])
def test_set_epoch_reaches_workers(path: Path, start: str, persistent: bool) -> None:
    expected, made = epochs_of(path, 5), reader(path)
    loops = loader(made, start=start, persistent_workers=persistent)
    assert rows(loops) == expected[0]
    made.set_epoch(3)
    assert rows(loops) == expected[3]
    assert rows(loops) == expected[4]
    made.set_epoch(3)
    assert rows(loops) == expected[3]


def test_a_state_loaded_here_reaches_persistent_workers(path: Path) -> None:
    expected, made, other = epochs_of(path, 3), reader(path), reader(path, epochs=3)
    states = [other.state_dict() for _ in islice(other, 17)]
    loops = loader(made, persistent_workers=True)
    assert rows(loops) == expected[0]
    made.load_state_dict({**states[-1], "until": 2})
    assert rows(loops) == expected[1][5:]
    assert rows(islice(made, 3)) == expected[1][5:8]  # the reader itself is where it was set to
    assert rows(loops) == expected[1][8:]


def test_what_the_reader_does_not_know_it_does_not_tell(path: Path) -> None:
    made = reader(path)
    assert made.state_dict()["epoch"] == made.epoch == 0
    loops = iter(loader(made))
    next(loops)
    for ask in (made.state_dict, lambda: made.epoch, made.__getstate__):
        with pytest.raises(UsageError, match=r"workers of a DataLoader.*StatefulDataLoader"):
            ask()
    list(loops)
    with pytest.raises(UsageError, match="set_epoch"):
        made.state_dict()
    made.set_epoch(1)
    assert made.state_dict()["epoch"] == made.epoch == 1
    assert rows(islice(made, 2)) == epochs_of(path, 2)[1][:2]
    assert made.state_dict()["batch"] == 2


def test_a_loop_that_was_left_is_said(path: Path, tmp_path: Path) -> None:
    log, told = logging.getLogger("sapwood.data.workers"), tmp_path / "log"
    handler = logging.FileHandler(told)  # workers are other processes
    log.addHandler(handler)
    try:
        expected, made = epochs_of(path, 3), reader(path)
        for persistent in (True, False):
            made.set_epoch(0)
            loops = loader(made, persistent_workers=persistent)
            assert rows(islice(loops, 3)) == expected[0][:3]
            assert rows(loops) == expected[1]
            assert rows(loops) == expected[2]
    finally:
        log.removeHandler(handler)
        handler.close()
    assert told.read_text().count("was left before its end; the next one begins with epoch 1") == 1


@pytest.mark.parametrize("persistent", [False, True])
def test_where_a_loop_without_end_was_left_is_not_known(path: Path, persistent: bool) -> None:
    made = reader(path, epochs=None)
    loops = loader(made, persistent_workers=persistent)
    whole = rows(reader(path, epochs=4))
    assert rows(islice(loops, 20)) == whole[:20]
    with pytest.raises(UsageError, match=r"second loop .* epochs=None"):
        next(iter(loops))
    made.set_epoch(1)
    assert rows(islice(loops, 20)) == whole[12:32]


class Twice(IterableDataset[Any]):
    """A user's own dataset around a reader, which goes through it several times."""

    def __init__(self, inner: LmdbReader, times: int) -> None:
        self.inner, self.times = inner, times

    def __iter__(self) -> Iterator[Any]:
        for _ in range(self.times):
            yield from self.inner


@pytest.mark.parametrize("persistent", [False, True])
def test_several_passes_in_one_loop(path: Path, persistent: bool) -> None:
    """Workers are in different passes then, and one may be far ahead of another."""
    expected = sorted(rows(reader(path, epochs=40)))
    loops = loader(Twice(reader(path), 20), persistent_workers=persistent)
    assert sorted(rows(loops) + rows(loops)) == expected


def in_a_child(made: LmdbReader, batches: Any, answers: Any) -> None:
    try:
        next(batches)
    except UsageError as error:
        answers.put(str(error))
    loops = loader(made, workers=1)
    answers.put([rows(loops) for _ in range(2)])


def test_a_forked_process_reads_for_itself(path: Path) -> None:
    """It is no worker: its loops are not those of the process it comes from."""
    expected, made = epochs_of(path, 3), reader(path, policy="coal")
    batches = iter(made)
    assert next(batches).tolist() == expected[0][0]
    context = multiprocessing.get_context("fork")
    answers = context.Queue()
    child = context.Process(target=in_a_child, args=(made, batches, answers))
    child.start()
    assert "this iterator is of process" in answers.get(timeout=30)
    assert answers.get(timeout=30) == [expected[0][1:], expected[1]]
    child.join(30)
    assert made.state_dict()["batch"] == 1
    assert rows(batches) == expected[0][1:]
    assert rows(loader(made, workers=1)) == expected[1]


@pytest.mark.parametrize("start", ["fork", "forkserver"])
@pytest.mark.parametrize("persistent", [False, True])
def test_a_database_changed_between_loops(path: Path, start: str, persistent: bool) -> None:
    """Never another database in the middle of a training, and never only a worker that is gone."""
    loops = loader(reader(path), workers=1, start=start, persistent_workers=persistent)
    assert len(rows(loops)) == BATCHES
    plain(path, [(b"another", b"one")])
    with pytest.raises(DataError, match=r"changed|make a new reader"):
        next(iter(loops))
    del loops
    gc.collect()  # the error has frames that hold the persistent workers


def same(batch: Any) -> Any:
    return batch


def test_records_of_a_database_changed_between_loops(path: Path) -> None:
    loops = DataLoader(
        LmdbRecords(path, decode=numbers_of),
        batch_size=23,
        collate_fn=same,
        num_workers=1,
        multiprocessing_context="forkserver",
    )
    assert len(list(loops)) == 10
    plain(path, [(b"00000000a", b"one")])
    with pytest.raises(DataError, match="changed"):
        next(iter(loops))


def stateful(of: Any, workers: int, **options: Any) -> Any:
    torchdata = pytest.importorskip("torchdata.stateful_dataloader")
    context = "fork" if workers else None
    return torchdata.StatefulDataLoader(
        of, batch_size=None, num_workers=workers, multiprocessing_context=context, **options
    )


@STATEFUL
@pytest.mark.parametrize(("workers", "persistent"), [(2, False), (2, True), (1, False)])
@pytest.mark.parametrize("done", [5, 11, 12])
def test_a_resumed_loader_goes_on_to_the_next_epochs(
    path: Path, workers: int, persistent: bool, done: int
) -> None:
    expected = epochs_of(path, 4)
    first = stateful(reader(path), workers, persistent_workers=persistent)
    assert rows(first) == expected[0]
    assert rows(islice(first, done)) == expected[1][:done]
    state = first.state_dict()
    again = stateful(reader(path), workers, persistent_workers=persistent)
    again.load_state_dict(state)
    assert rows(again) == expected[1][done:]
    assert rows(again) == expected[2]
    assert rows(again) == expected[3]


@STATEFUL
@pytest.mark.parametrize(("workers", "persistent"), [(0, False), (2, False), (2, True)])
def test_a_loader_resumed_at_the_end_of_an_epoch(
    path: Path, workers: int, persistent: bool
) -> None:
    expected = epochs_of(path, 3)
    first = stateful(reader(path), workers, persistent_workers=persistent)
    assert rows(first) == expected[0]
    state = first.state_dict()
    again = stateful(reader(path), workers, persistent_workers=persistent)
    again.load_state_dict(state)
    assert rows(again) == expected[1]
    assert rows(again) == expected[2]


@STATEFUL
def test_the_state_of_one_worker_is_not_that_of_a_reader(path: Path) -> None:
    loops = stateful(reader(path), 2)
    list(islice(loops, 3))
    snapshots = loops.state_dict()["_snapshot"]["_worker_snapshots"]
    states = [one["dataset_state"] for one in snapshots.values()]
    assert {(one["worker"], one["workers"]) for one in states} == {(0, 2), (1, 2)}
    with pytest.raises(ConfigError, match=r"that of worker 0 of 2 of a DataLoader"):
        reader(path).load_state_dict(states[0])
    alone = stateful(reader(path), 1)
    list(islice(alone, 3))
    (one,) = alone.state_dict()["_snapshot"]["_worker_snapshots"].values()
    made = reader(path)
    made.load_state_dict(one["dataset_state"])
    assert rows(made) == epochs_of(path, 1)[0][3:]


def test_one_reader_has_one_loop(path: Path) -> None:
    """The other one would end without a word, as if it had read everything."""
    for end, why in (
        (iter, "another loop over the reader has begun"),
        (lambda made: made.set_epoch(1), "set_epoch was called"),
        (lambda made: made.load_state_dict(made.state_dict()), "load_state_dict was called"),
        (lambda made: made.close(), "the reader was closed"),
    ):
        made = reader(path)
        batches = iter(made)
        next(batches)
        end(made)
        with pytest.raises(UsageError, match=f"ended before its last batch, as {why}"):
            next(batches)
        made.close()
    made = reader(path)
    batches = iter(made)
    assert len(list(batches)) == BATCHES
    made.set_epoch(1)
    assert list(batches) == []  # it had come to its end
