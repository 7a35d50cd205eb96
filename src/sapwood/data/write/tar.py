"""Tar files as webdataset has them: members with one name and different endings are a sample."""

from __future__ import annotations

import bz2
import gzip
import lzma
import re
import tarfile
import zlib
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import IO, Any

from sapwood.data.write.base import MAIN, NAMES, Kind, Sample
from sapwood.data.write.table import check_names
from sapwood.errors import ConfigError, DataError

__all__ = ["SUFFIXES", "Tar"]

_OPENERS: dict[str, Callable[[IO[bytes]], Any]] = {
    ".tar": lambda raw: raw,
    ".tar.gz": lambda raw: gzip.GzipFile(fileobj=raw),
    ".tgz": lambda raw: gzip.GzipFile(fileobj=raw),
    ".tar.bz2": bz2.BZ2File,
    ".tar.xz": lzma.LZMAFile,
}
SUFFIXES = tuple(_OPENERS)
_DAMAGE = (tarfile.TarError, EOFError, OSError, zlib.error, lzma.LZMAError, ValueError)
_NAME = re.compile(r"((?:.*/)?[^./]+)\.([^/]+)")
_DRAIN = 2**20

_Group = tuple[str, dict[str, bytes], int]
"""The name of a sample, its members by ending, and what was read for it."""


class _Header(tarfile.TarInfo):
    """tarfile takes a damaged header for the end of the archive, and so loses what is behind it."""

    @classmethod
    def fromtarfile(cls, tarfile_: tarfile.TarFile) -> _Header:
        try:
            return super().fromtarfile(tarfile_)
        except tarfile.HeaderError as error:
            # An empty block: the end as it must be.
            if isinstance(error, tarfile.EOFHeaderError):  # type: ignore[attr-defined]
                raise
            raise DataError(
                f"byte {tarfile_.offset}: expected the header of a member, or the mark of the "
                f"end: {error}"
            ) from error


class Tar:
    """Samples of one or several tar files, in their order.

    Each ending is a database, named like it, and all have the same keys. If only one ending is
    there, or was chosen, it is the main database.
    """

    kind: Kind = "tar"

    def __init__(self, files: Sequence[Path], *, columns: Sequence[str] | None) -> None:
        """Look at the first sample: all others must have the same endings.

        Raises:
            ConfigError: there are no samples, or not what was chosen.
            DataError: the first file is damaged.
        """
        self._files = files
        self.nbytes = sum(file.stat().st_size for file in files)
        self._chosen = None if columns is None else tuple(columns)
        with closing(self._groups()) as groups:
            first = next(groups, None)
        if first is None:
            raise ConfigError(f"{files[0]}: no samples in it; expected members such as 0001.jpg")
        self._columns = self._chosen or tuple(sorted(first[1]))
        single = len(self._columns) == 1
        if not single:
            check_names(self._columns)
        self.databases: tuple[str, ...] = (NAMES, *((MAIN,) if single else self._columns))
        self.facts: dict[str, Any] = {
            "columns": {MAIN if single else column: {"suffix": column} for column in self._columns},
        }

    def samples(self) -> Iterator[Sample]:
        """Sample after sample."""
        for name, found, read in self._groups():
            raw = name.encode(errors="surrogateescape")
            yield Sample((raw, *self._values(name, found)), read)

    def _values(self, name: str, found: dict[str, bytes]) -> tuple[bytes, ...]:
        missing = [column for column in self._columns if column not in found]
        extra = [] if self._chosen else [one for one in found if one not in self._columns]
        if missing or extra:
            raise ConfigError(
                f"sample {name!r} has {', '.join(sorted(found))}; expected "
                f"{', '.join(self._columns)} in every sample; choose with --column what all have"
            )
        return tuple(found[column] for column in self._columns)

    def _groups(self) -> Generator[_Group, None, None]:
        for file in self._files:
            try:
                yield from self._of_file(file)
            except DataError as error:
                raise DataError(f"{file}: {error}") from error
            except ConfigError:
                raise
            except _DAMAGE as error:
                raise DataError(f"{file}: damaged or cut off: {error}") from error

    def _of_file(self, file: Path) -> Iterator[_Group]:
        base, found, before = None, dict[str, bytes](), 0
        with file.open("rb") as raw, _opened(file, raw) as stream:
            for name, suffix, data in _members(stream, self._chosen):
                if name != base:
                    if base is not None:
                        yield base, found, raw.tell() - before
                    base, found, before = name, {}, raw.tell()
                if suffix in found:
                    raise DataError(f"{name}.{suffix} is there twice in one sample")
                if data is not None:
                    found[suffix] = data
            if base is not None:
                yield base, found, max(raw.tell() - before, 0)


def _opened(file: Path, raw: IO[bytes]) -> Any:
    suffix = max((one for one in SUFFIXES if file.name.lower().endswith(one)), key=len)
    return closing(_OPENERS[suffix](raw))


def _members(
    stream: IO[bytes], chosen: Sequence[str] | None
) -> Iterator[tuple[str, str, bytes | None]]:
    """Names, endings and bytes; members that nobody chose are not read."""
    with tarfile.open(fileobj=stream, mode="r:", tarinfo=_Header) as archive:
        while (member := archive.next()) is not None:
            archive.members.clear()  # type: ignore[attr-defined]  # it would keep them all
            split = _NAME.fullmatch(member.name)
            if member.isdir() or split is None or split[1].startswith("__"):
                continue
            if not member.isfile():
                raise DataError(f"{member.name} is a link or a device; expected files only")
            name, suffix = split[1], split[2].lower()
            wanted = chosen is None or suffix in chosen
            opened = archive.extractfile(member) if wanted else None
            yield name, suffix, None if opened is None else opened.read()
        while rest := stream.read(_DRAIN):  # a checksum, if it has one, is at its end
            if rest.strip(b"\0"):
                raise DataError(
                    "it goes on behind the mark of its end; it is damaged, or several archives "
                    "were put into one"
                )
