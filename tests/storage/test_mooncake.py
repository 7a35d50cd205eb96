"""What is particular to objects in Mooncake."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sapwood.errors import (
    AlreadyThere,
    Damaged,
    NoRoom,
    NotFound,
    StorageError,
    Unreachable,
    UsageError,
)
from sapwood.storage import Wanted, open_keeper
from sapwood.storage.mooncake import keeper as module
from sapwood.storage.mooncake.keeper import MooncakeKeeper
from sapwood.testing import mooncake
from sapwood.testing.storage.common import content


@pytest.fixture
def keeper(moon_place: str) -> Iterator[MooncakeKeeper]:
    with MooncakeKeeper(moon_place) as one:
        yield one


def test_a_read_is_one_request_for_its_bytes(
    keeper: MooncakeKeeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = {f"a/{n}": content(n, 500_000) for n in range(3)}
    for key, there in data.items():
        keeper.put(key, [there])
    real, asked = keeper.client.read, []

    def counted(rows: Any, out: Any) -> Any:
        asked.append(out.nbytes)
        return real(rows, out)

    monkeypatch.setattr(keeper.client, "read", counted)
    chance = np.random.default_rng(0)
    starts = [int(at) for at in chance.integers(0, 490_000, 60)]
    wanted = [Wanted(f"a/{n % 3}", at, bytearray(3000)) for n, at in enumerate(starts)]
    keeper.read(wanted)
    for one in wanted:
        assert one.out == data[one.key][one.start : one.start + 3000]
    assert len(asked) == 1
    assert asked[0] <= 1.1 * 60 * 3000


def test_a_large_read_is_cut(keeper: MooncakeKeeper, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_REQUEST", 100_000)
    data = content(1, 1_234_567)
    keeper.put("a", [data])
    out, part = bytearray(len(data)), bytearray(150_001)
    keeper.read([Wanted("a", 0, out), Wanted("a", 99_999, part), Wanted("a", 5, bytearray(0))])
    assert out == data
    assert part == data[99_999:250_000]


def test_bytes_of_two_objects_are_never_mixed(
    keeper: MooncakeKeeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_REQUEST", 1000)
    keeper.put("a", [bytes(2000)])
    real, calls = keeper.client.read, []

    def replaced(rows: Any, out: Any) -> Any:
        found = real(rows, out)
        calls.append(rows)
        if len(calls) == 1:
            keeper.put("a", [b"?" * 2000], replace=True)
        return found

    monkeypatch.setattr(keeper.client, "read", replaced)
    with pytest.raises(StorageError, match="was replaced while it was read"):
        keeper.read([Wanted("a", 0, bytearray(2000))])


@pytest.mark.parametrize("nbytes", [10, 5000])
def test_an_object_of_another_size_comes_between_look_and_read(
    keeper: MooncakeKeeper, monkeypatch: pytest.MonkeyPatch, nbytes: int
) -> None:
    keeper.put("a", [bytes(1000)])
    real, looked = keeper.client.size, []

    def late(key: str) -> int:
        found = real(key)
        if not looked:
            looked.append(key)
            keeper.put("a", [b"?" * nbytes], replace=True)
        return found

    monkeypatch.setattr(keeper.client, "size", late)
    assert keeper.get("a") == b"?" * nbytes


def test_who_was_first_is_told_although_mooncake_does_not(keeper: MooncakeKeeper) -> None:
    first, second = keeper.begin("a"), keeper.begin("a")
    first.write(b"first")
    second.write(b"second")
    second.publish()
    with pytest.raises(AlreadyThere):
        first.publish()
    assert keeper.get("a") == b"second"


def test_foreign_objects_are_not_taken_for_ours(keeper: MooncakeKeeper) -> None:
    foreign = np.zeros(100, np.uint8)
    keeper.client.put(keeper.place.key("foreign"), foreign, replace=False)
    with pytest.raises(Damaged, match="not put there by Sapwood"):
        keeper.get("foreign")


def test_a_put_whose_writer_died_is_no_object_and_gives_way(keeper: MooncakeKeeper) -> None:
    store: Any = keeper.client._store
    config = keeper.client._config_type()
    assert store.batch_put_session_start([keeper.place.key("a")], [100], config) == [0]
    began = time.monotonic()
    with pytest.raises(NotFound):
        keeper.get("a")
    assert list(keeper.list()) == []
    keeper.put("a", [b"the next one"])  # as soon as Mooncake has given the other one up
    assert keeper.get("a") == b"the next one"
    assert time.monotonic() - began < 60.0


def test_a_fork_says_so(keeper: MooncakeKeeper) -> None:
    keeper.put("a", [b"1"])
    child = os.fork()
    if not child:
        try:
            keeper.get("a")
            os._exit(1)
        except UsageError:
            os._exit(0)
        except BaseException:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert keeper.get("a") == b"1"


def test_keepers_of_one_cluster_share_a_client_that_the_last_one_closes(moon_place: str) -> None:
    first = MooncakeKeeper(moon_place)
    users, threads = first.client.users, threading.active_count()
    with MooncakeKeeper(moon_place) as second:
        assert second.client is first.client
        assert first.client.users == users + 1
        second.put("a", [bytes(1000)])
        second.ask([Wanted("a", 0, bytearray(10))]).wait()
        draft = second.begin("b")
    draft.discard()
    assert first.client.users == users
    assert threading.active_count() == threads
    client = first.client
    first.close()
    first.close()
    assert client.users == users - 1


def test_nobody_listens() -> None:
    began = time.monotonic()
    with pytest.raises(Unreachable, match="start mooncake_master"):
        open_keeper("mooncake://127.0.0.1:9/x?metrics=9")
    assert time.monotonic() - began < 10.0


def test_the_memory_is_full_and_goes(moon: mooncake.Cluster, tmp_path: Path) -> None:
    """What does not fit is refused; what a client held is gone with it, which is said."""
    with (
        mooncake.serve(tmp_path / "other", 2**26) as cluster,
        MooncakeKeeper(cluster.place("x"), timeout=5.0) as keeper,
    ):
        with pytest.raises(NoRoom, match="segment="):
            keeper.put("a", [np.zeros(2**26, np.uint8)])
        assert list(keeper.list()) == []
        with MooncakeKeeper(cluster.place("x"), segment=2**27) as giver:
            giver.put("large", [content(2, 2**26)])
            assert keeper.get("large") == content(2, 2**26)
        with pytest.raises((Unreachable, NotFound)):  # it lay in what that one gave
            keeper.get("large")
        keeper.put("a", [content(1, 100_000)])
        cluster.kill_owner()
        with pytest.raises((Unreachable, NotFound)):
            keeper.get("a")
        cluster.stop()
        with pytest.raises(Unreachable):
            keeper.get("a")
        with pytest.raises(Unreachable):
            list(keeper.list())
