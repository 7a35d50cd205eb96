"""Arrays whose first axis counts records, in one file or several."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sapwood.data.write.base import MAIN, NAMES, SHAPES, Kind, Sample
from sapwood.errors import ConfigError

__all__ = ["Column", "Table", "Whole", "check_names"]

_LONGEST_NAME = 511


@dataclass(frozen=True, kw_only=True, eq=False)
class Column:
    """One array of a file."""

    name: str
    data: NDArray[Any]
    """The array, or its bytes with the same first axis if numpy does not know the dtype."""
    dtype: str
    """As torch and numpy call it; bytes are never changed."""
    shape: tuple[int, ...]


class Table:
    """Record *n* is row *n* of each column, over all files as if they were one.

    One column goes to the main database, several go to databases with their names.
    """

    def __init__(
        self, kind: Kind, files: Sequence[tuple[Path, list[Column]]], *, shuffle: int | None
    ) -> None:
        """All files must have the same columns.

        Raises:
            ConfigError: they have not, or columns have different numbers of rows.
        """
        self.kind: Kind = kind
        first = [_form(column) for column in files[0][1]]
        for file, columns in files:
            _check_file(file, columns)
            if [_form(column) for column in columns] != first:
                raise ConfigError(
                    f"{file}: expected {_said(first)} as in {files[0][0]}, and it has "
                    f"{_said([_form(column) for column in columns])}"
                )
        self._files = [[column.data for column in columns] for _, columns in files]
        self._shuffle = shuffle
        self.nbytes = sum(data.nbytes for columns in self._files for data in columns)
        names = [name for name, _, _ in first]
        if len(names) == 1:
            self.databases: tuple[str, ...] = (MAIN,)
        else:
            check_names(names)
            self.databases = tuple(names)
        self.facts: dict[str, Any] = {
            "columns": {
                database: {"dtype": dtype, "shape": list(shape)}
                for database, (_, dtype, shape) in zip(self.databases, first, strict=True)
            },
            "shuffle": shuffle,
        }

    def samples(self) -> Iterator[Sample]:
        """Row after row."""
        for columns, row in self._rows():
            values = tuple(data[row].tobytes() for data in columns)
            yield Sample(values, sum(map(len, values)))

    def _rows(self) -> Iterator[tuple[list[NDArray[Any]], int]]:
        counts = [len(columns[0]) for columns in self._files]
        if self._shuffle is None:
            for columns, count in zip(self._files, counts, strict=True):
                for row in range(count):
                    yield columns, row
            return
        ends = np.cumsum(counts)
        for row in np.random.default_rng(self._shuffle).permutation(int(ends[-1])).tolist():
            file = int(np.searchsorted(ends, row, side="right"))
            yield self._files[file], row - int(ends[file]) + counts[file]


class Whole:
    """Each array is one record, with its name, dtype and shape beside it."""

    def __init__(
        self, kind: Kind, files: Sequence[tuple[Path, list[Column]]], *, shuffle: int | None
    ) -> None:
        """Arrays need have nothing in common."""
        self.kind: Kind = kind
        self._columns = [column for _, columns in files for column in columns]
        if shuffle is not None:
            order = np.random.default_rng(shuffle).permutation(len(self._columns))
            self._columns = [self._columns[n] for n in order.tolist()]
        self.nbytes = sum(column.data.nbytes for column in self._columns)
        self.databases: tuple[str, ...] = (NAMES, SHAPES, MAIN)
        self.facts: dict[str, Any] = {"columns": {MAIN: {}}, "shuffle": shuffle}

    def samples(self) -> Iterator[Sample]:
        """Array after array."""
        for column in self._columns:
            form = json.dumps({"dtype": column.dtype, "shape": column.shape}).encode()
            data = column.data.tobytes()
            yield Sample((column.name.encode(), form, data), len(data))


def check_names(names: Sequence[str]) -> None:
    """Raise unless databases can have these names.

    Raises:
        ConfigError: one is too long, or ours.
    """
    for name in names:
        raw = name.encode()
        if not name or name.startswith(".") or b"\0" in raw or len(raw) > _LONGEST_NAME:
            raise ConfigError(
                f"{name!r} cannot be the name of a database: expected 1 to {_LONGEST_NAME} bytes "
                "that do not begin with a dot; choose other columns with --column"
            )


def _form(column: Column) -> tuple[str, str, tuple[int, ...]]:
    return column.name, column.dtype, column.shape[1:]


def _check_file(file: Path, columns: Sequence[Column]) -> None:
    for column in columns:
        if not column.shape:
            raise ConfigError(
                f"{file}: {column.name or 'the array'} is a single number; expected an array whose "
                "first axis counts records, or use --whole"
            )
        if column.shape[0] != columns[0].shape[0]:
            raise ConfigError(
                f"{file}: {columns[0].name} has {columns[0].shape[0]} rows and {column.name} has "
                f"{column.shape[0]}; choose columns of the same length with --column, or use "
                "--whole for one record for each"
            )


def _said(forms: Sequence[tuple[str, str, tuple[int, ...]]]) -> str:
    return ", ".join(f"{name} {dtype} {list(shape)}".strip() for name, dtype, shape in forms)
