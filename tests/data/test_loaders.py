"""Inside of torch's DataLoader, with and without workers, and of torchdata's."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from sapwood.data import Batch, LmdbReader, LmdbRecords
from tests.data.databases import numbered, plain


@pytest.fixture
def path(tmp_path: Path) -> Path:
    made = tmp_path / "a.mdb"
    plain(made, numbered(230, lambda n: 3000))
    return made


def reader(path: Path, **options: Any) -> LmdbReader:
    settings: dict[str, Any] = {"seed": 2, "decode": numbers_of, "streams": 4, "window": 200_000}
    return LmdbReader(path, 20, **(settings | options))


def numbers_of(batch: Batch) -> torch.Tensor:
    return torch.from_numpy(batch.index.copy())


def tensor_of(batch: Batch) -> torch.Tensor:
    return batch.tensor


def same(batch: Any) -> Any:
    return batch


def rows(batches: Any) -> list[list[int]]:
    return [batch.tolist() for batch in batches]


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("start", ["fork", "forkserver"])
def test_the_same_batches_in_the_same_order(path: Path, workers: int, start: str) -> None:
    """The fork server's processes get the reader pickled, as those of spawn do."""
    whole = rows(reader(path, epochs=2))
    loader = DataLoader(
        reader(path, epochs=2),
        batch_size=None,
        num_workers=workers,
        multiprocessing_context=start,
    )
    assert rows(loader) == whole
    assert rows(DataLoader(reader(path, epochs=2), batch_size=None)) == whole
    assert len(loader) == len(whole) == 24


def test_workers_after_some_batches_here(path: Path) -> None:
    whole, half = rows(reader(path)), reader(path)
    first = rows(islice(half, 5))
    loader = DataLoader(half, batch_size=None, num_workers=2, multiprocessing_context="fork")
    assert first + rows(loader) == whole
    half.set_epoch(1)
    assert rows(loader) == rows(reader(path, epochs=2))[12:]


def test_forked_workers_and_their_parent_have_memory_of_their_own(path: Path) -> None:
    """The ring is kept for the next pass, and a fork must not make it one of several processes."""
    whole, parent = rows(reader(path, epochs=4)), reader(path, policy="coal", decode=None)
    expected = [value for _, value in numbered(230, lambda n: 3000)]

    def read(batches: Any) -> list[list[int]]:
        found = list(batches)
        for batch in found:
            assert [bytes(one) for one in batch] == [expected[n] for n in batch.index.tolist()]
        return [batch.index.tolist() for batch in found]

    assert read(parent) == whole[:12]
    loader = DataLoader(parent, batch_size=None, num_workers=2, multiprocessing_context="fork")
    begun = iter(loader)
    first = [next(begun)]
    assert read(parent) == whole[12:24]  # while the workers read the same epoch
    assert read(first + list(begun)) == whole[12:24]
    assert read(parent) == whole[24:36]


@pytest.mark.parametrize("workers", [0, 2])
def test_records_by_number(path: Path, workers: int) -> None:
    expected = [value for _, value in numbered(230, lambda n: 3000)]
    loader = DataLoader(
        LmdbRecords(path, decode=tensor_of),
        batch_size=32,
        shuffle=True,
        collate_fn=same,
        num_workers=workers,
        multiprocessing_context="forkserver" if workers else None,
    )
    found = [row.numpy().tobytes() for batch in loader for row in batch]
    assert sorted(found) == sorted(expected)
    records = LmdbRecords(path)
    assert len(records) == 230
    assert records[7] == expected[7]
    assert records[-1] == expected[-1]
    batch = records.__getitems__([4, 1, 4])
    assert [bytes(one) for one in batch] == [expected[4], expected[1], expected[4]]
    with pytest.raises(IndexError, match="record 230 of 230"):
        records[230]
    records.close()
    assert records[0] == expected[0]
    records.close()


# torchdata uses what this torch warns about.
@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
@pytest.mark.parametrize("workers", [0, 2])
def test_stateful_data_loader(path: Path, workers: int) -> None:
    torchdata = pytest.importorskip("torchdata.stateful_dataloader")

    def make() -> Any:
        context = "fork" if workers else None
        return torchdata.StatefulDataLoader(
            reader(path), batch_size=None, num_workers=workers, multiprocessing_context=context
        )

    whole = rows(make())
    assert whole == rows(reader(path))
    for done in (1, 4, 5, 11):
        loader = make()
        before = rows(islice(loader, done))
        state = loader.state_dict()
        after = make()
        after.load_state_dict(state)
        assert before + rows(after) == whole
