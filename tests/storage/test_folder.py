"""Folders: full disks, foreign things in them, writers that come and go at the same time."""

from __future__ import annotations

import errno
import fcntl
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from sapwood.errors import AlreadyThere, NoRoom, NotFound, StorageError, Truncated
from sapwood.storage import Durability, Wanted
from sapwood.storage.files import lock_draft
from sapwood.storage.folder import FolderKeeper
from sapwood.storage.folderdraft import DRAFTS
from sapwood.testing import faults
from tests.storage.mounts import Mount, in_child

SMALL = 2 * 2**20


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    path = tmp_path / "disk"
    path.mkdir()
    return path


@pytest.fixture
def keeper(tmp_path: Path) -> FolderKeeper:
    return FolderKeeper(tmp_path / "place")


def everything(folder: Path) -> list[str]:
    return sorted(str(one.relative_to(folder)) for one in folder.rglob("*"))


def test_a_full_disk(disk: Path) -> None:
    def work(mount: Mount) -> None:
        keeper = FolderKeeper(disk)
        assert keeper.durability is Durability.WRITTEN  # a tmpfs is gone with the power
        keeper.put("deep/first", [bytes(2**20)])
        before = everything(disk)
        for _ in range(3):
            with pytest.raises(NoRoom, match="No space left on device"):
                keeper.put("deep/er/second", [bytes(2**20)] * 2)
            assert everything(disk) == before
            with keeper.begin("other/third") as draft, pytest.raises(NoRoom):
                draft.write_parts(bytes(2**16) for _ in range(100))
            assert everything(disk) == before
        assert keeper.get("deep/first") == bytes(2**20)
        keeper.remove(["deep/first"])
        keeper.put("deep/er/second", [bytes(2**19)] * 3)
        mount.change(nbytes=SMALL, read_only=True)
        with pytest.raises(StorageError, match="Read-only file system"):
            keeper.put("third", [b"x"])
        with pytest.raises(StorageError, match="Read-only file system"):
            keeper.remove(["deep/er/second"])
        assert keeper.size("deep/er/second") == 3 * 2**19

    in_child(disk, SMALL, work)


def test_an_object_is_nothing_but_its_bytes(keeper: FolderKeeper) -> None:
    keeper.put("deep/a", [b"12", b"345"])
    assert (keeper.folder / "deep" / "a").read_bytes() == b"12345"
    assert everything(keeper.folder) == [DRAFTS, "deep", "deep/a"]
    keeper.remove(["deep/a"])
    assert everything(keeper.folder) == [DRAFTS]


def test_a_truncated_object_is_found(keeper: FolderKeeper) -> None:
    keeper.put("a", [bytes(10_000)])
    os.truncate(keeper.folder / "a", 9_000)
    out = bytearray(10_000)
    with pytest.raises(Truncated, match="9000 bytes"):
        keeper.read([Wanted("a", 0, out)])
    keeper.read([Wanted("a", 0, memoryview(out)[:9_000])])


def test_one_that_is_truncated_while_it_is_read_is_found(
    keeper: FolderKeeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    keeper.put("a", [bytes(10_000)])
    real = os.preadv

    def shorter(fd: int, buffers: list[memoryview], offset: int) -> int:
        os.truncate(keeper.folder / "a", 100)
        return real(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", shorter)
    with pytest.raises(Truncated, match="ends at byte 100"):
        keeper.read([Wanted("a", 0, bytearray(10_000))])


def test_many_ranges_are_few_system_calls(
    keeper: FolderKeeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = np.arange(2**20, dtype=np.uint32).tobytes()
    keeper.put("a", [data])
    real, calls = os.preadv, list[int]()

    def counted(fd: int, buffers: list[memoryview], offset: int) -> int:
        calls.append(len(buffers))
        return real(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", counted)
    outs = [bytearray(4000) for _ in range(1000)]
    keeper.read([Wanted("a", n * 4000, out) for n, out in enumerate(outs)])
    assert b"".join(outs) == data[: 4000 * 1000]
    assert len(calls) == 1


def test_what_is_not_an_object_is_no_object(keeper: FolderKeeper) -> None:
    keeper.put("a", [b"1"])
    (keeper.folder / ".hidden").write_bytes(b"x")
    (keeper.folder / "no key").write_bytes(b"x")
    (keeper.folder / "folder").mkdir()
    os.mkfifo(keeper.folder / "pipe")
    (keeper.folder / "folder" / "dangling").symlink_to("nowhere")
    assert [entry.key for entry in keeper.list()] == ["a"]
    with pytest.raises(NotFound):
        keeper.get("folder")
    with pytest.raises(NotFound):
        keeper.get("a/below")
    with pytest.raises(NotFound):
        keeper.get("folder/dangling")
    with pytest.raises(StorageError, match="a FIFO"):
        keeper.get("pipe")
    keeper.remove(["folder", "a/below"])
    assert (keeper.folder / "folder").is_dir()


def test_a_key_is_an_object_or_a_folder(keeper: FolderKeeper) -> None:
    keeper.put("a/b", [b"1"])
    for replace in (False, True):
        for key in ("a", "a/b/c"):
            with pytest.raises(StorageError, match="at the same time"):
                keeper.put(key, [b"2"], replace=replace)
    assert everything(keeper.folder) == [DRAFTS, "a", "a/b"]
    assert list((keeper.folder / DRAFTS).iterdir()) == []


def test_writers_while_others_remove_the_last_object_of_a_folder(keeper: FolderKeeper) -> None:
    def come_and_go(me: int) -> None:
        for turn in range(100):
            keeper.put(f"deep/er/{me}", [bytes([me])], replace=bool(turn % 2))
            assert keeper.get(f"deep/er/{me}") == bytes([me])
            keeper.remove([f"deep/er/{me}"])

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(come_and_go, range(4)))
    assert everything(keeper.folder) == [DRAFTS]


def test_a_writer_whose_draft_is_swept_while_it_is_made_makes_another(
    keeper: FolderKeeper,
) -> None:
    """Between the file's creation and its lock, it looks like one of a dead writer."""
    keeper.put("a", [b"1"])
    real, swept = keeper.files.draft, list[Path]()

    def slow(path: Path, *, direct: bool):  # type: ignore[no-untyped-def]
        if not swept:
            swept.append(path)
            raise FileExistsError("as ``Files.draft`` says it")
        return real(path, direct=direct)

    keeper.files.draft = slow  # type: ignore[method-assign]
    keeper.put("b", [b"2"])
    assert keeper.get("b") == b"2"


def test_the_lock_of_a_swept_draft_is_refused(keeper: FolderKeeper) -> None:
    keeper.put("a", [b"1"])
    path = keeper.folder / DRAFTS / "half-made"

    def sweep(**_: object) -> None:
        path.write_bytes(b"")
        assert keeper.sweep() == 1

    with (
        faults.inject("files", sweep, when=lambda op, **_: op == "create"),
        keeper.files.draft(path, direct=False),
    ):
        pass
    with path.open("wb") as gone, path.open("rb") as other:
        assert lock_draft(gone.fileno())
        assert not lock_draft(other.fileno())
        path.unlink()
        assert not lock_draft(gone.fileno())


def test_a_publish_whose_answer_got_lost(keeper: FolderKeeper) -> None:
    """A file server does it, and is asked again because its answer never came."""
    real = keeper.files.link

    def twice(source: Path, target: Path) -> None:
        real(source, target)
        real(source, target)

    keeper.files.link = twice  # type: ignore[method-assign]
    keeper.put("a", [b"1"])
    assert keeper.get("a") == b"1"
    with pytest.raises(AlreadyThere):
        keeper.put("a", [b"2"])


def test_drafts_on_a_network_are_cleared_by_their_age(tmp_path: Path) -> None:
    keeper = FolderKeeper(tmp_path, filesystem="nfs")
    keeper.put("a", [b"1"])
    for name, age in (("young", 10), ("old", 4000)):
        path = tmp_path / DRAFTS / name
        path.write_bytes(b"x")
        now = path.stat().st_mtime
        os.utime(path, (now - age, now - age))
    assert keeper.sweep() == 1
    assert everything(tmp_path / DRAFTS) == ["young"]


def test_large_reads_over_a_network_are_side_by_side(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keeper = FolderKeeper(tmp_path, filesystem="lustre")
    data = np.random.default_rng(1).bytes(20 * 2**20)
    keeper.put("a", [data])
    real, threads = os.preadv, set[int]()

    def noted(fd: int, buffers: list[memoryview], offset: int) -> int:
        threads.add(threading.get_ident())
        return real(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", noted)
    out = bytearray(len(data))
    keeper.read([Wanted("a", 0, out)])
    assert out == data
    assert threads
    assert threading.get_ident() not in threads


def test_bytes_of_two_objects_are_never_mixed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slices over a network are read through descriptors of their own."""
    keeper = FolderKeeper(tmp_path, filesystem="nfs")
    keeper.put("a", [bytes(17 * 2**20)])
    real, calls, turn = keeper._opened, list[str](), threading.Lock()

    def opened(key: str) -> int:
        with turn:
            calls.append(key)
            if len(calls) == 2:
                keeper.put("a", [b"?" * (17 * 2**20)], replace=True)
            return real(key)

    monkeypatch.setattr(keeper, "_opened", opened)
    with pytest.raises(StorageError, match="was replaced while it was read"):
        keeper.read([Wanted("a", 0, bytearray(17 * 2**20))])


def test_without_locks_drafts_are_cleared_by_their_age(
    keeper: FolderKeeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(*_: object) -> None:
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", none)
    with keeper.begin("a") as draft:
        draft.write(b"1")
        assert keeper.sweep() == 0
        draft.publish()
    (keeper.folder / DRAFTS / "dead").write_bytes(b"x")
    assert keeper.sweep() == 0
    assert keeper.sweep(quiet=-60.0) == 1


def test_a_source_that_goes_while_it_is_linked(keeper: FolderKeeper) -> None:
    keeper.put("a", [b"1"])
    with (
        faults.inject("files", lambda **_: keeper.remove(["a"]), when=lambda op, **_: op == "link"),
        pytest.raises(NotFound),
    ):
        keeper.link("a", "deep/b")
    assert everything(keeper.folder) == [DRAFTS]


def test_a_draft_that_somebody_removed(keeper: FolderKeeper) -> None:
    with keeper.begin("deep/a") as draft:
        draft.write(b"1")
        for one in (keeper.folder / DRAFTS).iterdir():
            one.unlink()
        with pytest.raises(StorageError, match=r"draft of .* is gone"):
            draft.publish()
    assert everything(keeper.folder) == [DRAFTS]


def test_where_links_are_not_allowed_that_is_said(
    keeper: FolderKeeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(keeper.files, "link", refused)
    with pytest.raises(StorageError, match="hard links"):
        keeper.put("a", [b"1"])
    keeper.put("a", [b"1"], replace=True)
    assert everything(keeper.folder) == [DRAFTS, "a"]


def test_what_was_put_with_less_is_synced_later(
    keeper: FolderKeeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    if keeper.durability < Durability.SYNCED:
        pytest.skip("a tmpfs promises no more than WRITTEN")
    keeper.put("deep/er/one", [b"1"])
    synced = set()
    real = os.fsync

    def fsync(fd: int) -> None:
        synced.add(os.fstat(fd).st_ino)
        real(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    keeper.sync(["deep/er/one"])
    path = keeper.path("deep/er/one")
    assert {one.stat().st_ino for one in (path, path.parent, path.parents[1])} <= synced
    with pytest.raises(NotFound):
        keeper.sync(["deep/er/two"])
