"""Shards as parts of standard safetensors files, written by all ranks at once.

Every rank knows the layout of the files from the catalog and writes its own bytes to their places.
The header is rank 0's; nobody needs it before the checkpoint is complete. What a rank saved beside
tensors, where it is more than its record holds, is a file of its own.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sapwood.errors import CheckpointError, TierError
from sapwood.regular import open_regular, read_regular
from sapwood.state.catalog import FileLayout
from sapwood.storage.files import Files, FileWriter
from sapwood.tiers.digest import matches
from sapwood.tiers.local import record_name
from sapwood.tiers.manifest import MANIFEST, Manifest
from sapwood.tiers.record import EXTRAS, Range, ShardRecord
from sapwood.tiers.shardfile import read_exactly

__all__ = ["AssembledShard", "check_manifest", "check_published", "extras_name", "write_pieces"]

_SMALL = 64 * 1024
"""Neighbours in a file that are smaller than this are written in one system call."""

Run = tuple[int, list[memoryview]]


def write_pieces(files: Files, folder: Path, record: ShardRecord, data: Any) -> None:
    """Write a shard's bytes to their places in the files of ``folder``, and sync them.

    Raises:
        TierError: the files were laid out by ranks with other tensors.
        OSError: as the system gives it.
    """
    memory = memoryview(data).cast("B")
    for layout in record.catalog.layouts.values():
        runs = list(_runs(record, layout, memory))
        if not runs and record.rank != 0:
            continue
        with files.share(folder / layout.filename) as writer:
            _lay_out(writer, layout, record.rank)
            for offset, parts in runs:
                if len(parts) == 1:
                    writer.write_at(offset, parts[0])
                else:
                    writer.write_parts(offset, parts)
            writer.sync()
    if record.extras_bytes:
        with files.share(folder / extras_name(record.rank)) as writer:
            writer.resize(record.extras_bytes)
            writer.write_at(0, memory[record.shard.extras_at : record.nbytes])
            writer.sync()


def extras_name(rank: int) -> str:
    """The file of the bytes that a rank's extras refer to."""
    return f"shard-{rank}.extras"


def _lay_out(writer: FileWriter, layout: FileLayout, rank: int) -> None:
    size = writer.size
    if size > layout.size:
        raise TierError(
            f"{writer.path} has {size} bytes, but the tensors of rank {rank} need {layout.size}; "
            "all ranks of a run must save the same model"
        )
    if size < layout.size:  # new, or left by a crash with less than its size
        writer.resize(layout.size)
    if rank == 0:
        writer.write_at(0, layout.header)


def _runs(record: ShardRecord, layout: FileLayout, memory: memoryview) -> Iterator[Run]:
    """The shard's bytes by place in the file; small neighbours are put together."""
    pieces = [p for p in record.shard.pieces if p.file == layout.file and p.nbytes]
    placed = sorted((layout.start(p.name) + p.start, p.at, p.nbytes) for p in pieces)
    begin, end, parts = 0, -1, list[memoryview]()
    for offset, at, nbytes in placed:
        part = memory[at : at + nbytes]
        if offset == end and max(nbytes, len(parts[-1])) < _SMALL:
            parts.append(part)
        else:
            if parts:
                yield begin, parts
            begin, parts = offset, [part]
        end = offset + nbytes
    if parts:
        yield begin, parts


def check_published(home: Path) -> Manifest:
    """See that a complete checkpoint is what its manifest says, but for the tensors' bytes.

    Raises:
        CheckpointError: a file is missing, or a header, record or the manifest is damaged.
    """
    manifest = check_manifest(home)
    path = home / record_name(0)
    try:
        layouts = ShardRecord.decode(read_regular(path), str(path)).catalog.layouts
        for layout in layouts.values():
            _check_header(home / layout.filename, layout)
    except OSError as error:
        raise CheckpointError(f"cannot read {home}: {error.strerror or error}") from error
    return manifest


def check_manifest(home: Path) -> Manifest:
    """See that the manifest of a complete checkpoint was made of the records that are there.

    Raises:
        CheckpointError: it was not, or one of them is missing or damaged.
    """
    try:
        manifest = Manifest.decode(read_regular(home / MANIFEST), str(home / MANIFEST))
        for rank, mark in enumerate(manifest.records):
            path = home / record_name(rank)
            if not matches(read_regular(path), mark, manifest.algorithm):
                raise CheckpointError(f"{path} is not the one its manifest was made of")
    except OSError as error:
        raise CheckpointError(f"cannot read {home}: {error.strerror or error}") from error
    return manifest


def _check_header(path: Path, layout: FileLayout) -> None:
    with os.fdopen(open_regular(path), "rb") as file:
        size, header = os.fstat(file.fileno()).st_size, file.read(len(layout.header))
    if size != layout.size or header != layout.header:
        raise CheckpointError(f"{path} is damaged: its header or size is not what was written")


class AssembledShard:
    """A rank's part of assembled files. Fulfils ``StoredShard``."""

    def __init__(self, home: Path, rank: int) -> None:
        """Read the record and open the files: from now on the folder may be renamed.

        Raises:
            FileNotFoundError: the record is not there.
            CheckpointError: something else is wrong.
        """
        self._home = home
        self._fds: dict[str, int] = {}
        path = home / record_name(rank)
        try:
            self.record = ShardRecord.decode(read_regular(path), str(path))
            self._layouts = self.record.catalog.layouts
            for file in {p.file for p in self.record.shard.pieces if p.nbytes}:
                layout = self._layouts[file]
                self._open(file, layout.filename, layout.size)
            if self.record.extras_bytes:
                self._open(EXTRAS, extras_name(rank), self.record.extras_bytes)
        except FileNotFoundError:
            self.close()
            raise
        except OSError as error:
            self.close()
            why = error.strerror or error
            raise CheckpointError(f"cannot read the shard in {home}: {why}") from error
        except CheckpointError:
            self.close()
            raise

    def _open(self, file: str, name: str, expected: int) -> None:
        path = self._home / name
        fd = self._fds[file] = open_regular(path)
        size = os.fstat(fd).st_size
        if size != expected:
            raise CheckpointError(f"{path} has {size} bytes, its records say {expected}")

    def read_into(self, part: Range, out: Any) -> None:
        """Read a range from its place in the file."""
        piece = part.piece
        if piece.file == EXTRAS:
            path = self._home / extras_name(self.record.rank)
            read_exactly(self._fds[EXTRAS], path, part.start, out)
            return
        layout = self._layouts[piece.file]
        offset = layout.start(piece.name) + piece.start + part.start
        read_exactly(self._fds[piece.file], self._home / layout.filename, offset, out)

    def close(self) -> None:
        """Close the files."""
        while self._fds:
            os.close(self._fds.popitem()[1])
