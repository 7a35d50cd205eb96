"""The back end that is objects alone: what the shipped suite does not see of it."""

from __future__ import annotations

import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from sapwood.errors import (
    ConfigError,
    Damaged,
    ModelExists,
    ModelNotFound,
    NoRoom,
    StoreError,
    Unreachable,
)
from sapwood.repository.base import BlobPart
from sapwood.repository.names import parse
from sapwood.repository.objects import backend as backends
from sapwood.repository.objects import saving
from sapwood.repository.objects.backend import ObjectBackend
from sapwood.repository.objects.layout import MARKER, condemned_key, framed_json
from sapwood.repository.objects.opening import open_objects
from sapwood.repository.objects.saving import LEASE_KIND, leased
from sapwood.storage import Durability, open_keeper
from sapwood.storage.folder import FolderKeeper
from sapwood.storage.memory import MemoryKeeper
from sapwood.testing import ranks, seaweed
from sapwood.testing.repository.common import (
    content,
    gc,
    new_model,
    problems_of,
    read_all,
    references,
    save,
)
from tests.repository.objects import again, backend, change, keys, opened

__all__ = ["backend"]


# -- requests --------------------------------------------------------------------------------


class Counted:
    """What a keeper in a bucket is asked for."""

    def __init__(self, backend: ObjectBackend, monkeypatch: pytest.MonkeyPatch) -> None:
        self.requests: list[str] = []
        self.nbytes = 0
        objects: Any = backend.keeper.objects  # type: ignore[attr-defined]
        do, part = objects._do, objects._range

        def counted(op: str, name: str, request: Any) -> Any:
            if op != "read":
                self.requests.append(op)
            return do(op, name, request)

        def counted_range(name: str, start: int, nbytes: int) -> Any:
            self.requests.append("range")
            self.nbytes += nbytes
            return part(name, start, nbytes)

        monkeypatch.setattr(objects, "_do", counted)
        monkeypatch.setattr(objects, "_range", counted_range)


def test_a_partial_load_is_one_request_for_its_bytes(
    weed: seaweed.Server, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    layers = {f"layer{n:02d}": content(n, 10_000 + n) for n in range(40)}
    with opened(open_keeper(place, **weed.access)) as backend:
        save(backend, "a@1", layers)
        reader = again(backend)
        counted = Counted(backend, monkeypatch)
        _, manifest = reader.manifest(parse("a@1"))
        assert counted.requests == ["list", "get", "get"], "the log, its event, the head"
        del counted.requests[:]
        names = list(layers)[10:20]
        rows = [manifest.row(manifest.by_name[name]) for name in names]
        parts = [BlobPart(row.blob, 0, memoryview(bytearray(row.nbytes))) for row in rows]
        reader.read(parts)
        wanted = sum(row.nbytes for row in rows)
        assert counted.requests == ["range"]
        assert wanted <= counted.nbytes <= 1.1 * wanted
        assert [bytes(part.out) for part in parts] == [layers[name] for name in names]
        del counted.requests[:]
        reader.manifest(parse("a@1"))
        assert counted.requests == ["get", "get"], "is there another event, and the head"
        with pytest.raises(ModelNotFound):
            reader.find(parse("a@2"))


def test_a_save_takes_few_requests(
    weed: seaweed.Server, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(open_keeper(place, **weed.access)) as backend:
        save(backend, "a@1", {"t": content(1, 1000)})
        counted = Counted(backend, monkeypatch)
        backend.save(new_model("a@2", {"t": b"2"}), [memoryview(b"2")], {}, Durability.REPLICATED)
        assert counted.requests == ["create", "create", "get", "create"]
        del counted.requests[:]
        data = content(1, 1000)
        backend.save(new_model("a@3", {"t": data}), [memoryview(data)], {}, Durability.WRITTEN)
        assert len(counted.requests) <= 7
        assert counted.requests.count("create") == 3, "a lease, a head, an event, and no pack"


def test_distant_tensors_are_not_read_over(
    weed: seaweed.Server, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = {f"t{n}": content(n, 300_000) for n in range(9)}
    with opened(open_keeper(place, **weed.access)) as backend:
        save(backend, "a@1", tensors)
        counted = Counted(backend, monkeypatch)
        _, manifest = backend.manifest(parse("a"))
        blobs = [manifest.blobs[n] for n in (0, 4, 8)]
        backend.read([BlobPart(blob, 0, memoryview(bytearray(300_000))) for blob in blobs])
        assert counted.nbytes <= 1.1 * 900_000
        assert counted.requests.count("range") == 3


# -- who wins, and what is lost --------------------------------------------------------------


def test_an_answer_that_got_lost_is_found_out(
    backend: ObjectBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = backend.keeper.put

    def lossy(key: str, *args: Any, **options: Any) -> None:
        real(key, *args, **options)
        if key.startswith("log/"):
            raise Unreachable("no answer")

    monkeypatch.setattr(backend.keeper, "put", lossy)
    assert save(backend, "a@1", {"t": b"1"}).version == "1"
    assert backend.tag(parse("a@1"), "best").tags == ("best",)
    backend.untag("a", "best")
    monkeypatch.undo()
    assert references(again(backend)) == ["a@1"]
    assert backend.find(parse("a@1")).tags == ()


def test_a_save_that_got_no_answer_keeps_its_bytes(
    backend: ObjectBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody knows whether it has happened; so nothing of it may be removed but by gc."""
    real = backend.keeper.put

    def silent(key: str, *args: Any, **options: Any) -> None:
        if key.startswith("log/"):
            raise Unreachable("no answer")
        real(key, *args, **options)

    monkeypatch.setattr(backend.keeper, "put", silent)
    with pytest.raises(Unreachable):
        save(backend, "a@1", {"t": b"1"})
    monkeypatch.undo()
    assert len(keys(backend, "packs")) == len(keys(backend, "heads")) == 1
    assert gc(backend, quiet=60.0).packs == 0
    assert gc(backend).packs == 1
    assert keys(backend, "heads") == []


def test_another_writer_comes_first_and_the_number_is_the_next(
    backend: ObjectBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = again(backend)
    save(backend, "a", {"t": b"1"})
    real, raced = backend.keeper.put, []

    def second(key: str, *args: Any, **options: Any) -> None:
        if key.startswith("log/") and not raced:
            raced.append(key)
            save(other, "a", {"t": b"2"}, tags=["best"])
        real(key, *args, **options)

    monkeypatch.setattr(backend.keeper, "put", second)
    assert save(backend, "a", {"t": b"3"}).version == "3"
    raced.clear()
    monkeypatch.setattr(
        backend.keeper,
        "put",
        lambda key, *a, **o: (
            (raced.append(key), save(other, "a@x", {"t": b"x"}))
            if key.startswith("log/") and not raced
            else None,
            real(key, *a, **o),
        ),
    )
    with pytest.raises(ModelExists):
        save(backend, "a@x", {"t": b"y"})
    monkeypatch.undo()
    assert read_all(backend, "a@x") == {"t": b"x"}
    assert gc(backend).packs == 0, "the bytes of the save that lost are gone at once"


STEPS = [
    *((step, False) for step in ("packs", "heads", "layers", "log", "leases")),
    *((step, True) for step in ("packs", "log")),
]


def dies(folder: str, step: str, after: bool) -> None:
    """Save, and be killed at one of the things that are written."""
    keeper = FolderKeeper(Path(folder))
    with opened(keeper) as backend:
        begin = keeper._begin

        def fatal(key: str, *args: Any, **options: Any) -> Any:
            draft = begin(key, *args, **options)
            if key.startswith(step):
                if after:
                    draft.publish = lambda: (type(draft).publish(draft), kill())  # type: ignore
                else:
                    kill()
            return draft

        backend.manifest(parse("parent@1"))
        keeper._begin = fatal  # type: ignore[method-assign]
        tensors = {"shared": content(1, 1000), "own": content(2, 50_000)}
        save(backend, "child@1", tensors, parent="parent@1", layers={b"layer": 5})


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize(("step", "after"), STEPS)
def test_a_saver_killed_at_any_step(tmp_path: Path, step: str, after: bool) -> None:
    folder = tmp_path / "models"
    with opened(FolderKeeper(folder)) as backend:
        save(backend, "parent@1", {"shared": content(1, 1000)})
        clean = set(keys(backend, ""))
    (outcome,) = ranks.spawn(dies, 1, str(folder), step, after, expect_errors=True)
    assert outcome.signal == signal.SIGKILL
    with opened(FolderKeeper(folder)) as backend:
        saved = step == "log" and after
        assert references(backend) == (["child@1"] if saved else []) + ["parent@1"]
        assert problems_of(backend) == []
        gc(backend)
        assert problems_of(backend) == []
        if saved:
            assert read_all(backend, "child@1")["own"] == content(2, 50_000)
            return
        left = {key for key in keys(backend, "") if not key.startswith("leases/")}
        assert left == clean, "its room was not given back"
        save(backend, "child@1", {"own": content(3, 10)}, parent="parent@1")
    assert not list((folder / ".drafts").glob("*"))


def test_no_room_saves_nothing() -> None:
    with opened(MemoryKeeper(limit=60_000)) as backend:
        save(backend, "a@1", {"t": content(1, 30_000)})
        before = set(keys(backend, ""))
        for nbytes in range(29_000, 28_000, -50):  # also where the pack fits, and its head does not
            try:
                save(backend, "b@1", {"t": content(2, nbytes)})
            except NoRoom:
                assert set(keys(backend, "")) == before
                assert references(backend) == ["a@1"]
            else:
                break
        else:
            raise AssertionError("it never fitted")
        assert nbytes < 29_000
        assert read_all(backend, "b@1") == {"t": content(2, nbytes)}


def test_bytes_that_do_not_fit_their_manifest_are_refused(backend: ObjectBackend) -> None:
    with pytest.raises(StoreError, match="3 bytes was given 2"):
        backend.save(new_model("a@1", {"t": b"123"}), [memoryview(b"12")], {}, Durability.MEMORY)
    assert keys(backend, "packs") == []


# -- gc beside others --------------------------------------------------------------------------


def test_what_was_moved_often_is_found(backend: ObjectBackend) -> None:
    """A version hints at where its tensors lay when it was saved, however often they move."""
    frozen = content(0, 1000)
    save(backend, "old@1", {"frozen": frozen, "own": content(1, 50_000)})
    first = keys(backend, "packs")
    save(backend, "keeper@0", {"frozen": frozen})
    reader = again(backend)
    assert read_all(reader, "keeper@0") == {"frozen": frozen}
    backend.remove(parse("old@1"))
    for turn in range(1, 7):
        before = keys(backend, "packs")
        gc(backend)
        assert len(keys(backend, "packs")) == 1
        assert keys(backend, "packs") != before
        # The pack that holds it now gets a neighbour, which goes again.
        (pack,) = keys(backend, "packs")
        data = backend.keeper.get(pack)
        backend.keeper.put(pack, [data, bytes(5000)], replace=True)
        assert gc(again(backend)).live == 1000, turn
        (pack,) = keys(backend, "packs")
        backend.keeper.put(pack, [backend.keeper.get(pack), bytes(5000)], replace=True)
    assert read_all(reader, "keeper@0") == {"frozen": frozen}
    counted: list[str] = []
    fresh = again(backend)
    real = backend.keeper.read

    def noted(wanted: Any) -> None:
        counted.append(wanted[0].key)
        real(wanted)

    backend.keeper.read = noted  # type: ignore[method-assign]
    assert read_all(fresh, "keeper@0") == {"frozen": frozen}
    assert len(counted) == 2, "the hint, and where it is"
    assert counted[0] == first[0]
    assert problems_of(fresh) == []
    assert len(keys(backend, "moved")) == 1


def test_threads_save_remove_read_and_sweep(backend: ObjectBackend) -> None:
    together = threading.Barrier(4)

    def work(me: int) -> None:
        together.wait(30)
        for turn in range(12):
            data = content(turn % 3, 20_000)
            save(backend, f"m{me}@{turn}", {"t": data, "own": content(100 * me + turn, 500)})
            if turn > 2:
                backend.remove(parse(f"m{me}@{turn - 3}"))
            assert read_all(backend, f"m{me}@{turn}")["t"] == data

    def sweep() -> None:
        together.wait(30)
        for _ in range(10):
            gc(backend, quiet=60.0)

    with ThreadPoolExecutor(4) as pool:
        jobs = [pool.submit(work, me) for me in range(3)] + [pool.submit(sweep)]
        for job in jobs:
            job.result()
    assert problems_of(backend) == []
    assert gc(backend).live == 3 * 20_000 + 9 * 500


def test_a_leased_pack_stays(backend: ObjectBackend) -> None:
    save(backend, "a@1", {"t": content(1, 1000)})
    (pack,) = keys(backend, "packs")
    with leased(backend.keeper, [pack]):
        backend.remove(parse("a@1"))
        assert gc(backend).packs == 0
        assert keys(backend, "packs") == [pack]
    assert keys(backend, "leases") == []
    assert gc(backend).packs == 1


def test_the_lease_of_a_dead_saver_ends(backend: ObjectBackend) -> None:
    save(backend, "a@1", {"t": content(1, 1000)})
    (pack,) = keys(backend, "packs")
    change(backend, "leases/dead", framed_json(LEASE_KIND, {"packs": [pack]}))
    backend.remove(parse("a@1"))
    assert gc(backend).packs == 0
    objects: Any = backend.keeper._objects  # type: ignore[attr-defined]
    old = objects["leases/dead"]
    objects["leases/dead"] = type(old)(old.nbytes, old.rests, old.changed - 3700)
    assert gc(backend).packs == 1
    assert keys(backend, "leases") == []


def test_a_condemned_pack_is_not_shared(backend: ObjectBackend) -> None:
    data = content(1, 1000)
    save(backend, "a@1", {"t": data})
    (pack,) = keys(backend, "packs")
    change(backend, condemned_key(pack, "of-a-running-gc"), b"")
    save(backend, "a@2", {"t": data}, parent="a@1")
    assert len(keys(backend, "packs")) == 2
    backend.keeper.remove([pack])
    assert read_all(again(backend), "a@2") == {"t": data}


def test_a_pack_that_was_removed_meanwhile_is_not_shared(backend: ObjectBackend) -> None:
    data = content(1, 1000)
    other = again(backend)
    save(backend, "a@1", {"t": data})
    other.remove(parse("a@1"))
    gc(other)
    assert keys(backend, "packs") == []
    save(backend, "a@2", {"t": data})
    assert read_all(again(backend), "a@2") == {"t": data}


def test_a_save_that_was_given_up_is_made_again(
    backend: ObjectBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Suspended between its bytes and its event, while a gc that waits for nobody goes by."""
    monkeypatch.setattr(backends, "_LONG", 0.0)
    other, real, swept = again(backend), backend.keeper.put, []

    def late(key: str, *args: Any, **options: Any) -> None:
        if key.startswith("log/") and not swept:
            swept.append(gc(other).packs)
        real(key, *args, **options)

    monkeypatch.setattr(backend.keeper, "put", late)
    record = save(backend, "a", {"t": content(1, 1000)}, tags=["best"])
    assert swept == [1]
    assert references(other) == [f"a@{record.version}"]
    assert read_all(again(backend), "a@best") == {"t": content(1, 1000)}
    assert problems_of(backend) == []


def test_a_saver_that_shares_between_the_looks_of_gc_keeps_its_pack(
    backend: ObjectBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, other = content(1, 1000), again(backend)
    save(backend, "a@1", {"t": data})
    read_all(other, "a@1")
    backend.remove(parse("a@1"))
    real, saved = backend.keeper.put, []

    def first(key: str, *args: Any, **options: Any) -> None:
        if key.startswith("condemned/") and not saved:
            saved.append(key)
            save(other, "b@1", {"t": data})
        real(key, *args, **options)

    monkeypatch.setattr(backend.keeper, "put", first)
    gc(backend)
    monkeypatch.undo()
    assert saved
    assert len(keys(backend, "packs")) == 1, "it was shared"
    assert read_all(again(backend), "b@1") == {"t": data}


def test_where_machines_see_each_other_late_gc_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A save that shared a pack in the moment before is found by its lease, which stays."""
    monkeypatch.setattr(saving, "LATE", 0.01)
    with opened(FolderKeeper(tmp_path, filesystem="nfs4")) as backend:
        save(backend, "a@1", {"t": content(1, 1000)})
        save(backend, "b@1", {"t": content(1, 1000), "own": content(2, 1000)})
        assert len(keys(backend, "leases")) == 1
        backend.remove(parse("a@1"))
        backend.remove(parse("b@1"))
        said: list[str] = []
        assert backend.gc(quiet=0.0, said=said.append).packs == 1, "the one that nobody shared"
        assert any("every machine" in line for line in said)
        assert len(keys(backend, "packs")) == 1


def test_gc_of_a_damaged_repository_removes_nothing(backend: ObjectBackend) -> None:
    save(backend, "a@1", {"t": content(1, 1000)})
    save(backend, "b@1", {"t": content(2, 1000)})
    backend.remove(parse("a@1"))
    (*_, head) = keys(backend, "heads")
    live = backend.view.saved[backend.find(parse("b@1")).id].head
    assert head
    change(backend, live, backend.keeper.get(live)[:-5])
    with pytest.raises(Damaged, match="truncated"):
        gc(backend)
    assert len(keys(backend, "packs")) == 2
    assert keys(backend, "gc") == []


# -- opening, forks --------------------------------------------------------------------------


def test_a_place_that_holds_something_else_is_left_alone() -> None:
    keeper = MemoryKeeper()
    keeper.put("mine", [b"1"])
    with pytest.raises(ConfigError, match="holds something else"):
        open_objects(keeper, "here", create=True)
    assert [entry.key for entry in keeper.list()] == ["mine"]
    with pytest.raises(ConfigError, match="create=True"):
        open_objects(MemoryKeeper(), "here", create=False)


def test_another_format_is_refused() -> None:
    keeper = MemoryKeeper()
    keeper.put(MARKER, [framed_json(b"RP", {"format": 2})])
    with pytest.raises(StoreError, match="newer version"):
        open_objects(keeper, "here", create=True)
    keeper.put(MARKER, [b"something"], replace=True)
    with pytest.raises(Damaged, match=MARKER):
        open_objects(keeper, "here", create=True)


def in_child(work: Any) -> int:
    child = os.fork()
    if not child:
        try:
            work()
            os._exit(0)
        except StoreError:
            os._exit(3)
        except BaseException:
            os._exit(2)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_a_fork_reads_and_saves_in_a_folder(tmp_path: Path) -> None:
    backend = open_objects(
        FolderKeeper(tmp_path), "here", create=True, reopen=lambda: FolderKeeper(tmp_path)
    )
    save(backend, "a@1", {"t": content(1, 1000)})
    _, manifest = backend.manifest(parse("a@1"))

    def work() -> None:
        out = bytearray(1000)
        backend.read([BlobPart(manifest.blobs[0], 0, memoryview(out))])
        assert bytes(out) == content(1, 1000)
        save(backend, "a@2", {"t": content(1, 1000)}, parent="a@1")
        backend.close()

    assert in_child(work) == 0
    assert references(backend) == ["a@1", "a@2"]
    assert len(keys(backend, "packs")) == 1
    backend.close()


def test_a_fork_of_what_cannot_be_forked_says_so(backend: ObjectBackend) -> None:
    save(backend, "a@1", {"t": b"1"})
    assert in_child(lambda: backend.models()) == 3


def test_foreign_objects_in_the_folders_are_passed_over(backend: ObjectBackend) -> None:
    save(backend, "a@1", {"t": b"1"})
    strays = ["log/stray", "log/a/b/c", "log/a/note", "heads/note", "moved", "note"]
    for key in strays:
        backend.keeper.put(key, [b"1"])
    assert references(again(backend)) == ["a@1"]
    assert read_all(again(backend), "a@1") == {"t": b"1"}
    save(again(backend), "a@2", {"t": b"2"})
    assert problems_of(again(backend)) == []
    gc(backend, quiet=60.0)
    assert set(strays) <= set(keys(backend, ""))
