"""From other kinds of files to an LMDB database."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sapwood.data.check import (
    optional_int,
    optional_strs,
    require_bool,
    require_callable,
    require_path,
)
from sapwood.data.index import build_index
from sapwood.data.pagefile import open_pages
from sapwood.data.write.about import KEY, pack
from sapwood.data.write.base import ABOUT, MAIN, Kind, Phase, Source, load_lmdb, silent
from sapwood.data.write.detect import open_source
from sapwood.data.write.draft import drafted
from sapwood.data.write.writer import Writer
from sapwood.errors import ConfigError, DataError

__all__ = ["Converted", "convert"]


@dataclass(frozen=True, kw_only=True)
class Converted:
    """What was written."""

    file: Path
    kind: Kind
    records: int
    databases: tuple[str, ...]
    """The databases that hold a value for each record; "" is the main one."""
    value_bytes: int
    file_bytes: int


def convert(
    source: str | os.PathLike[str],
    dest: str | os.PathLike[str],
    *,
    kind: Kind | None = None,
    columns: Sequence[str] | None = None,
    suffixes: Sequence[str] | None = None,
    whole: bool = False,
    shuffle: int | None = None,
    force: bool = False,
    phase: Phase = silent,
) -> Converted:
    """Write an LMDB database with the samples of other files; their bytes are not changed.

    Keys are the numbers of records. ``dest`` is there when all of it is, or not at all; then it has
    been read again, and each database has as many records as were written.

    Args:
        source: A folder of images, a .npy, .tar (also compressed) or .safetensors file, or a folder
            of such files.
        dest: The LMDB file.
        kind: What the source is; found from names if it is not given.
        columns: Which endings of a tar file's members, or which tensors; all if none is given.
        suffixes: Which files of a folder are records; images if none are given.
        whole: Each array is one record, and not each of its rows.
        shuffle: A seed, 0 or more: records are written in an order drawn from it. An image folder
            is in the order of its classes otherwise, which only a global shuffle takes apart again.
        force: Replace a file that is there.
        phase: Told what is being done, and how far it is.

    Raises:
        ConfigError: options make no sense, the source is not as expected, or ``dest`` exists.
        DataError: the source is damaged, or ``dest`` cannot be written.
    """
    load_lmdb("convert")
    require_path("source", source)
    target = Path(require_path("dest", dest))
    _check_columns(columns)
    optional_strs("suffixes", suffixes)
    optional_int("shuffle", shuffle, least=0)
    require_bool("whole", whole)
    require_bool("force", force)
    require_callable("phase", phase)
    with drafted(target, force=force) as draft:
        found = open_source(
            Path(source),
            kind=kind,
            columns=columns,
            suffixes=suffixes,
            whole=whole,
            shuffle=shuffle,
        )
        with Writer(draft, target, found.databases) as writer:
            _write(writer, found, phase)
            records, nbytes = writer.records, writer.nbytes
        if not records:
            raise ConfigError(f"{source}: no records in it; expected one at least")
        _check(draft, found, records, nbytes, phase)
        size = draft.stat().st_size
    return Converted(
        file=target,
        kind=found.kind,
        records=records,
        databases=found.databases,
        value_bytes=nbytes,
        file_bytes=size,
    )


def _write(writer: Writer, source: Source, phase: Phase) -> None:
    with phase("converting", source.nbytes) as advance:
        for sample in source.samples():
            writer.put(sample.values)
            advance(sample.read)
    facts = {"kind": source.kind, "records": writer.records, **source.facts}
    writer.finish(ABOUT, KEY, pack(facts))


def _check(draft: Path, source: Source, records: int, nbytes: int, phase: Phase) -> None:
    """Read the file as a reader does."""
    with open_pages(draft) as pages:
        size = pages.size
    found = 0
    with phase("checking", size) as advance:
        for name in source.databases:
            index = build_index(draft, None if name == MAIN else name, progress=advance)
            if len(index) != records:
                raise DataError(
                    f"{draft}: expected {records} records in {name or 'the main database'!r}, "
                    f"found {len(index)}; something else has written to it"
                )
            found += int(index.lengths.sum())
    if found != nbytes:
        raise DataError(f"{draft}: expected {nbytes} bytes of values, found {found}")


def _check_columns(columns: Sequence[str] | None) -> None:
    optional_strs("columns", columns)
    if columns is not None and (not columns or len(set(columns)) != len(columns)):
        raise ConfigError(f"columns={list(columns)}: expected one or more, each once")
