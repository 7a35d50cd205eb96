"""Checkpoints made and damaged by hand, and `sapwood ckpt` asked about them in this process."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

from sapwood.cli.main import main
from sapwood.tiers.local import LocalTier
from sapwood.tiers.record import CheckpointId
from tests.tiers.shards import ATTEMPT, fill, plan, shard

WORLD = 2


def save(folder: str | Path, *steps: int, ranks=range(WORLD), **options) -> None:
    tier = LocalTier(Path(folder))
    for step in steps:
        for rank in ranks:
            tier.put(*shard(step, rank, WORLD, **options))


def name(step: int) -> str:
    return CheckpointId(step, ATTEMPT).folder


def ask(capsys, *arguments: str, code: int = 0):
    """The JSON answer of a verb."""
    assert main(["ckpt", *arguments, "--json"]) == code
    return json.loads(capsys.readouterr().out)


def told(capsys, *arguments: str, code: int = 0) -> str:
    assert main(["ckpt", *arguments]) == code
    return capsys.readouterr().out


def refused(capsys, *arguments: str) -> str:
    assert main(["ckpt", *arguments]) == 1
    return capsys.readouterr().err


def flip(path: Path, offset: int) -> None:
    content = bytearray(path.read_bytes())
    content[offset] ^= 1
    path.write_bytes(content)


def age(path: Path, by: float = 7200) -> None:
    for one in (path, *path.rglob("*")):
        os.utime(one, (time.time() - by,) * 2)


def tensor_bytes(step: int, file: str, tensor: str) -> bytes:
    """What ``save`` made of a tensor, put together without the code under test."""
    shards = plan(WORLD)
    whole = bytearray(shards.catalog.by_key[file, tensor].nbytes)
    for one in shards.shards:
        memory = fill(shards, one.rank, step)
        for piece in one.pieces:
            if piece.key == (file, tensor):
                whole[piece.start : piece.stop] = bytes(memory[piece.at : piece.at + piece.nbytes])
    return bytes(whole)
