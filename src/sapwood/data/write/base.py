"""What converters are made of: a source gives samples, in order, and says what they are."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Literal, NamedTuple, Protocol, get_args

from sapwood.errors import ConfigError

__all__ = ["KINDS", "MAIN", "NAMES", "Kind", "Phase", "Sample", "Source", "load_lmdb", "silent"]

Kind = Literal["folder", "npy", "tar", "safetensors"]
KINDS: tuple[str, ...] = get_args(Kind)

MAIN = ""
"""Stands for the main database among the names of databases."""
# A dot sorts before digits, so that keys can be appended to the main database behind these.
ABOUT, LABELS, NAMES, SHAPES = ".about", ".labels", ".names", ".shapes"

Phase = Callable[[str, int], AbstractContextManager[Callable[[int], None]]]
"""Called with what begins and how many bytes it has; gives what to call with bytes done."""


class Sample(NamedTuple):
    """The values of one sample, one for each database of its source."""

    values: tuple[bytes, ...]
    read: int
    """Bytes of the source that were read for it."""


class Source(Protocol):
    """Samples of one kind of file."""

    kind: Kind
    nbytes: int
    """What there is to read."""
    databases: tuple[str, ...]
    """Where each value of a sample goes."""
    facts: dict[str, Any]
    """What cannot be seen in the bytes: dtypes, shapes, names of classes."""

    def samples(self) -> Iterator[Sample]:
        """All samples.

        Raises:
            DataError: a file is damaged or cannot be read.
        """
        ...


@contextmanager
def silent(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """A ``Phase`` that tells nobody."""
    yield lambda nbytes: None


def load_lmdb(what: str) -> Any:
    """The module of py-lmdb, which only writing needs.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        import lmdb
    except ImportError as error:
        raise ConfigError(f"{what} needs py-lmdb: pip install 'sapwood[data]'") from error
    return lmdb
