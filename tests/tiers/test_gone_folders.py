"""A folder that is removed while a shard is being written to it, and made anew by another rank."""

from __future__ import annotations

import errno
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from sapwood.errors import CheckpointError, TierError
from sapwood.storage.files import Files
from sapwood.tiers.base import Stored, Tier, verify
from sapwood.tiers.blobs import BlobFolder
from sapwood.tiers.external import ExternalTier
from sapwood.tiers.keeper import Blob
from sapwood.tiers.local import LocalTier
from sapwood.tiers.packed import PackedTier
from sapwood.tiers.record import CheckpointId
from tests.tiers import shards

NEWER = CheckpointId(9, "ffffff")
"""Of another training: what is dropped takes older folders without a record along."""


class Interrupted(Files):
    """Does something once, just before the operation of a number."""

    def __init__(self, at: int, act: Callable[[], None]) -> None:
        super().__init__()
        self.left, self.act = at, act

    def _next(self) -> None:
        self.left -= 1
        if self.left == 0:
            self.act()

    def create(self, path: Path) -> Any:
        self._next()
        return super().create(path)

    def share(self, path: Path) -> Any:
        self._next()
        return super().share(path)

    def publish(self, draft: Path, final: Path) -> None:
        self._next()
        super().publish(draft, final)

    def sync_folder(self, path: Path) -> None:
        self._next()
        super().sync_folder(path)


Make = Callable[[Path, Files], Tier]
TIERS: dict[str, Make] = {
    "external": ExternalTier,
    "local": lambda folder, files: LocalTier(folder, files=files),
    "packed": lambda folder, files: PackedTier(folder, files=files),
}


@pytest.mark.parametrize("kind", TIERS)
@pytest.mark.parametrize("at", range(1, 16))
def test_a_shard_is_never_there_without_its_bytes(tmp_path: Path, kind: str, at: int) -> None:
    make = TIERS[kind]
    other = make(tmp_path, Files())
    record, memory = shards.shard(7, 0, 2)

    def act() -> None:
        other.drop(NEWER)
        other.put(*shards.shard(7, 1, 2))

    files = Interrupted(at, act)
    tier = make(tmp_path, files)
    try:
        tier.put(record, memory)
    except TierError:
        files.left = 0
        tier.put(record, memory)  # as an engine does
    if files.left > 0:
        pytest.skip("a put has fewer operations")
    assert Stored(record.id, 0) in other.shards()
    with closing(other.open(Stored(record.id, 0))) as shard:
        verify(shard)


@pytest.mark.parametrize("at", range(1, 14))
def test_a_blob_is_never_there_without_its_bytes(tmp_path: Path, at: int) -> None:
    blob, other = Blob("partner", "00000007-0a1b2c", "shard-0"), BlobFolder(tmp_path)

    def act() -> None:
        other.drop("partner", blob.group)
        put(other, Blob("partner", blob.group, "shard-1"))

    def put(folder: BlobFolder, blob: Blob) -> None:
        with closing(folder.put(blob, 5)) as sink:
            sink.write(b"bytes")
            sink.seal(b"record")

    files = Interrupted(at, act)
    folder = BlobFolder(tmp_path, files=files)
    try:
        put(folder, blob)
    except TierError:
        files.left = 0
        put(folder, blob)
    if files.left > 0:
        pytest.skip("a put has fewer operations")
    try:
        other.record(blob)
    except CheckpointError:
        return  # it was dropped as a whole, when it was there
    out = bytearray(5)
    other.ask(blob, 0, 5).into(out)
    assert out == b"bytes"


def test_what_only_has_the_name_of_a_checkpoint_is_in_nobodys_way(tmp_path: Path) -> None:
    tier = LocalTier(tmp_path / "tier")
    tier.put(*shards.shard(7, 0, 1))
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (tier.folder / "00000003-ffffff").write_text("a file")
    (tier.folder / "00000004-ffffff").symlink_to(elsewhere)
    tier.drop(CheckpointId(7, shards.ATTEMPT))
    assert tier.shards() == []
    assert elsewhere.is_dir()
    assert (tier.folder / "00000003-ffffff").exists()


class Forbidden(Files):
    """Somebody else's folders are there."""

    def remove_tree(self, path: Path) -> None:
        if "ffffff" in path.name:
            raise PermissionError(errno.EPERM, "Operation not permitted", str(path))
        super().remove_tree(path)


@pytest.mark.parametrize("kind", ["external", "local"])
def test_what_others_left_and_cannot_be_removed_keeps_nothing_from_going(
    tmp_path: Path, kind: str
) -> None:
    tier = TIERS[kind](tmp_path, Forbidden())
    for step in (7, 8):
        tier.put(*shards.shard(step, 0, 1))
    for name in ("00000003-ffffff", "00000004-ffffff.partial", "00000005-ffffff.dropped"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "shard-0.bin").write_bytes(b"x")
    tier.drop(CheckpointId(7, shards.ATTEMPT))
    assert [stored.id.step for stored in tier.shards()] == [8]
    assert not (tmp_path / CheckpointId(7, shards.ATTEMPT).folder).exists()
