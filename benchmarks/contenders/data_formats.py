"""The same records in every format.

``python -m contenders.data_formats FOLDER COUNT NBYTES FORMAT...`` writes them.
It runs in a process of its own, so that a writer which fails or leaves threads harms nobody. It
prints, as JSON, why a format could not be written, and a digest of the records.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
import tarfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

SHARDS = 16
"""A multiple of ranks times workers, so that peers which divide shards get equal shares."""
PIECE = 1000
TINY, TINY_COUNT = "tiny", 64
"""A few records beside the others, to warm up with."""


def key_of(record: int) -> bytes:
    return b"%08d" % record


def records_of(count: int, nbytes: int) -> Iterator[bytes]:
    """Noise, so that no format can gain by compressing it."""
    rng = np.random.default_rng(nbytes)
    for begin in range(0, count, PIECE):
        some = min(PIECE, count - begin)
        block = rng.bytes(some * nbytes)
        for at in range(some):
            yield block[at * nbytes : (at + 1) * nbytes]


def digest_of(records: Any) -> int:
    """The same for any order."""
    return sum(map(zlib.crc32, records))


def write_lmdb(folder: Path, count: int, nbytes: int) -> None:
    """One transaction in the order of keys: what every guide to LMDB does."""
    import lmdb

    from sapwood.data import open_index

    size = (count + 1000) * (nbytes + 8192) * 2
    path = folder / "data.mdb"
    with lmdb.open(str(path), subdir=False, map_size=size, lock=False) as env:
        with env.begin(write=True) as txn:
            for number, record in enumerate(records_of(count, nbytes)):
                txn.put(key_of(number), record)
        env.sync(True)
    open_index(path)


def write_tar(folder: Path, count: int, nbytes: int) -> None:
    each, source = -(-count // SHARDS), enumerate(records_of(count, nbytes))
    for shard in range(SHARDS):
        with tarfile.open(folder / f"{shard:04d}.tar", "w", format=tarfile.USTAR_FORMAT) as tar:
            for _, (number, record) in zip(range(each), source, strict=False):
                member = tarfile.TarInfo(key_of(number).decode() + ".bin")
                member.size = nbytes
                tar.addfile(member, io.BytesIO(record))


def write_array_record(folder: Path, count: int, nbytes: int) -> None:
    """``group_size:1`` is what its documentation asks for with random access."""
    from array_record.python.array_record_module import ArrayRecordWriter

    writer = ArrayRecordWriter(str(folder / "data.array_record"), "group_size:1,uncompressed")
    for record in records_of(count, nbytes):
        writer.write(record)
    writer.close()


def write_litdata(folder: Path, count: int, nbytes: int) -> None:
    """What ``litdata.optimize`` does in its workers, without starting any."""
    from litdata.streaming.cache import Cache

    cache = Cache(str(folder), chunk_bytes=count * nbytes // SHARDS)
    for number, record in enumerate(records_of(count, nbytes)):
        cache[number] = record
    cache.done()
    cache.merge()


WRITERS: dict[str, Callable[[Path, int, int], None]] = {
    "lmdb": write_lmdb,
    "tar": write_tar,
    "array_record": write_array_record,
    "litdata": write_litdata,
}


def write(name: str, folder: Path, count: int, nbytes: int) -> None:
    (folder / name).mkdir(parents=True)
    WRITERS[name](folder / name, count, nbytes)


def main() -> None:
    folder, count, nbytes = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    failed: dict[str, str] = {}
    for name in sys.argv[4:]:
        try:
            with contextlib.redirect_stdout(sys.stderr):
                write(name, folder, count, nbytes)
                write(name, folder / TINY, TINY_COUNT, nbytes)
        except Exception as error:  # a peer's; the others go on
            failed[name] = f"{type(error).__name__}: {error}".splitlines()[0]
    print(json.dumps({"failed": failed, "digest": digest_of(records_of(count, nbytes))}))


if __name__ == "__main__":
    main()
