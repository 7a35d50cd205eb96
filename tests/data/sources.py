"""Files as other tools write them, with what is in them."""

from __future__ import annotations

import io
import random
import tarfile
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

Samples = list[tuple[str, dict[str, bytes]]]


def images(root: Path, classes: dict[str, int], seed: int = 0) -> dict[str, bytes]:
    """Files with random bytes, by their names, in the order of these."""
    chance = random.Random(seed)
    made = {}
    for name, count in classes.items():
        (root / name).mkdir(parents=True, exist_ok=True)
        for number in range(count):
            relative = f"{name}/{number}.jpg" if name else f"{number}.jpg"
            made[relative] = chance.randbytes(chance.randrange(1, 6000))
            (root / relative).write_bytes(made[relative])
    return dict(sorted(made.items()))


def samples(count: int, start: int = 0, seed: int = 0) -> Samples:
    chance = random.Random(seed + start)
    return [
        (
            f"part/{start + n:04d}",
            {
                "jpg": chance.randbytes(chance.randrange(9000)),
                "seg.png": b"p" * n,
                "cls": b"%d" % n,
            },
        )
        for n in range(count)
    ]


def tar(path: Path, content: Samples) -> None:
    """As webdataset's writer does; the name says how it is compressed."""
    kind = path.name.rpartition(".")[2]
    mode = {"tar": "w", "gz": "w:gz", "tgz": "w:gz", "bz2": "w:bz2", "xz": "w:xz"}[kind]
    with tarfile.open(path, mode) as archive:
        for name, parts in content:
            for suffix, data in parts.items():
                member = tarfile.TarInfo(f"{name}.{suffix}")
                member.size = len(data)
                archive.addfile(member, io.BytesIO(data))


def array(rows: int = 50, dtype: str = "<f4", seed: int = 0) -> NDArray[np.generic]:
    raw = np.random.default_rng(seed).bytes(rows * 3 * 7 * np.dtype(dtype).itemsize)
    return np.frombuffer(raw, dtype).reshape(rows, 3, 7)
