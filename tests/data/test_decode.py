"""An exception in ``decode`` names the record and the batch, and loses no other batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader

from sapwood.data import Batch, LmdbReader, LmdbRecords
from sapwood.errors import DataError
from tests.data.databases import numbered, plain

BAD = 37


@pytest.fixture
def path(tmp_path: Path) -> Path:
    made = tmp_path / "a.mdb"
    plain(made, [(key, b"bad" if n == BAD else b"good") for n, (key, _) in pairs()])
    return made


def pairs() -> Any:
    return enumerate(numbered(100, lambda n: 1))


def strict(batch: Batch) -> list[int]:
    if any(bytes(one) == b"bad" for one in batch):
        raise ValueError("not an image")
    return batch.index.tolist()


def reader(path: Path, decode: Any = strict, **options: Any) -> LmdbReader:
    return LmdbReader(path, 10, shuffle="none", decode=decode, **options)


SAYS = (
    r"batch 3 of epoch 0, record 37 \(key b'00000037', 3 bytes\): decode raised "
    "ValueError: not an image"
)


def test_it_names_record_and_batch(path: Path) -> None:
    batches = iter(reader(path))
    with pytest.raises(DataError, match=SAYS) as error:
        list(batches)
    assert isinstance(error.value.__cause__, ValueError)
    assert next(batches) == list(range(40, 50))  # whoever goes on has lost this batch only


def test_the_position_is_that_of_the_last_batch_given(path: Path) -> None:
    made = reader(path)
    with pytest.raises(DataError):
        list(made)
    assert made.state_dict()["batch"] == 3
    with pytest.raises(DataError, match="batch 3 of epoch 0, record 37"):
        next(iter(made))  # a new loop does not leave it out
    again = reader(path, decode=None)
    again.load_state_dict(made.state_dict())
    assert next(iter(again)).number == 3
    again.close()
    made.close()


@pytest.mark.parametrize("workers", [0, 1])
def test_in_a_data_loader(path: Path, workers: int) -> None:
    loader = DataLoader(
        reader(path),
        batch_size=None,
        num_workers=workers,
        multiprocessing_context="fork" if workers else None,
    )
    with pytest.raises(DataError, match=SAYS):
        list(loader)


def test_of_another_epoch_and_other_ranks(path: Path) -> None:
    made = reader(path, rank=1, world=2, epochs=3)
    made.set_epoch(2)
    with pytest.raises(DataError, match="batch 3 of epoch 2, record 37"):
        list(made)
    made.close()


def stopping(batch: Batch) -> Any:
    raise StopIteration


def whole_batches(batch: Batch) -> Any:
    if len(batch) != 10:
        raise AssertionError("ten, please")
    return strict(batch)


def together(batch: Batch) -> Any:
    if len(batch) > 4:
        raise ValueError("too many")


@pytest.mark.parametrize(
    ("decode", "says"),
    [
        (stopping, r"batch 0 of epoch 0, 10 records \(0, 1, 2, 3, 4, \.\.\.\), none of which"),
        (whole_batches, r"batch 3 of epoch 0, 10 records \(30, .* ValueError: not an image"),
        (together, r"batch 0 of epoch 0, 10 records \(0, .* ValueError: too many"),
        (lambda batch: batch.tensor, r"batch 3 .* \(30, .* UsageError: batch\.tensor needs"),
    ],
)
def test_what_is_not_about_one_record(path: Path, decode: Any, says: str) -> None:
    with pytest.raises(DataError, match=says):
        list(reader(path, decode))


def test_records_by_number(path: Path) -> None:
    records = LmdbRecords(path, decode=strict)
    with pytest.raises(DataError, match=r"^record 37 \(key b'00000037', 3 bytes\): decode raised"):
        records.take([5, 37, 4])
    with pytest.raises(DataError, match=r"^record 37 "):
        records[37]
    assert records[5] == [5]


def interrupted(batch: Batch) -> Any:
    raise KeyboardInterrupt


def test_an_interrupt_is_none(path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        next(iter(reader(path, interrupted)))
