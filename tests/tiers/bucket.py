"""What the tests of a bucket share: a tier on a real server, and what must be in it."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch

from sapwood.storage.s3.multipart import Multipart
from sapwood.storage.s3.objects import Objects
from sapwood.testing import faults, ranks, seaweed
from sapwood.tiers.base import Stored, verify
from sapwood.tiers.digest import digest
from sapwood.tiers.manifest import Manifest
from sapwood.tiers.record import CheckpointId
from sapwood.tiers.s3 import S3Tier, parts, upload
from tests.tiers.shards import ATTEMPT, plan, shard

SIZES = {"large": 1_340_000, "state": 64}
"""A slice a little longer than S3's shortest part, in one of the files."""
WHOLE = {"large": 2 * SIZES["large"], "state": 64}
"""The same for a single rank."""
ID = CheckpointId(7, ATTEMPT)


def tier(weed: seaweed.Server, place: str, **options: Any) -> S3Tier:
    return S3Tier(place, **{**weed.access, "timeout": 20.0, "retries": 2, **options})


def objects(weed: seaweed.Server, place: str) -> Objects:
    return Objects(tier(weed, place).place)


def uploads(weed: seaweed.Server, place: str) -> list[str]:
    return [one.name for one in Multipart(tier(weed, place).place).open_uploads()]


def expected(step: int, world: int, sizes: dict[str, int]) -> dict[str, dict[str, torch.Tensor]]:
    """The tensors of a checkpoint by file, straight from the bytes of its shards."""
    shards = plan(world, **sizes)
    found: dict[str, dict[str, torch.Tensor]] = {}
    memories = [shard(step, rank, world, **sizes)[1] for rank in range(world)]
    kinds = {"F32": torch.float32, "F64": torch.float64, "BF16": torch.bfloat16}
    for entry in shards.catalog.entries:
        raw = np.zeros(entry.nbytes, np.uint8)
        for memory, mine in zip(memories, shards.shards, strict=True):
            if piece := mine.by_key.get(entry.key):
                raw[piece.start : piece.stop] = memory[piece.at : piece.at + piece.nbytes]
        tensor = torch.from_numpy(raw).view(kinds[entry.dtype]) if raw.size else torch.empty(0)
        found.setdefault(entry.file, {})[entry.name] = tensor.view(entry.shape)
    return found


def check_files(store: Objects, id: CheckpointId, world: int, sizes: dict[str, int]) -> None:
    content = store.get(f"{id.folder}/manifest.json")
    manifest = json.loads(content)
    assert (manifest["step"], manifest["world"]) == (id.step, world)
    told = Manifest.decode(content, "manifest")  # the same as in a folder
    names = store.names(id.folder)
    for rank, mark in enumerate(told.records):
        if (name := f"{id.folder}/shard-{rank}.json") in names:  # a drop takes them first
            assert digest(store.get(name)) == mark
    wanted = expected(id.step, world, sizes)
    assert set(manifest["files"]) == {f"{file}.safetensors" for file in wanted}
    for file, tensors in wanted.items():
        content = store.get(f"{id.folder}/{file}.safetensors")
        assert len(content) == manifest["files"][f"{file}.safetensors"]
        found = safetensors.torch.load(content)
        assert found.keys() == tensors.keys()
        for name, tensor in tensors.items():
            assert found[name].dtype == tensor.dtype or not tensor.numel()
            assert found[name].shape == tensor.shape
            assert bits(found[name]) == bits(tensor)


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.flatten().view(torch.uint8).numpy().tobytes()


@contextmanager
def short_parts() -> Iterator[None]:
    """As short as S3 allows, so that several parts need few bytes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(upload, "PART", parts.MINIMUM)
        yield


def write(place: str, step: int, world: int, sizes: dict[str, int], only: int | None) -> None:
    """A writer in its own process: the access comes from the environment."""
    mine = ranks.rank() if only is None else only
    with short_parts(), closing(S3Tier(place, timeout=20.0, retries=2)) as here:
        here.put(*shard(step, mine, world, **sizes))


@contextmanager
def requests() -> Iterator[list[str]]:
    """The requests made inside the block, by name."""
    seen: list[str] = []
    lock = threading.Lock()

    def note(op: str, **_: object) -> None:
        with lock:
            seen.append(op)

    with faults.inject("s3", note, at=None):
        yield seen


def verify_all(here: S3Tier, stored: Stored) -> int:
    with closing(here.open(stored)) as found:
        return verify(found)


def bins(store: Objects) -> list[str]:
    return [name for name in store.names() if name.endswith(".bin")]
