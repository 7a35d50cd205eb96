"""A bucket on a real server: what is moved, in how many requests, and what goes wrong."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from sapwood.errors import (
    AlreadyThere,
    ConfigError,
    NotFound,
    StorageError,
    Truncated,
    Unreachable,
)
from sapwood.runtime.faults import ENV
from sapwood.storage import Durability, Wanted, open_keeper
from sapwood.storage.s3 import claims, draft
from sapwood.storage.s3.keeper import S3Keeper
from sapwood.storage.s3.multipart import Multipart
from sapwood.testing import faults, ranks, seaweed
from tests.storage.wire import Wire, counted

MINIMUM = 5 * 2**20
"""What a part of an upload has at least."""
TENSOR = 80 * 1024
DATA = np.random.default_rng(3).bytes(100 * TENSOR)


@pytest.fixture
def keeper(weed: seaweed.Server, place: str) -> Iterator[S3Keeper]:
    with S3Keeper(place, **weed.access, timeout=20.0, retries=2) as found:
        yield found


@pytest.fixture
def wired(weed: seaweed.Server, place: str) -> Iterator[tuple[S3Keeper, Wire]]:
    with counted(weed.endpoint) as wire:
        access = {**weed.access, "endpoint": wire.endpoint}
        with S3Keeper(place, **access, timeout=20.0, retries=2) as found:
            yield found, wire


@pytest.fixture
def short_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draft, "PART", MINIMUM)


@contextmanager
def requests() -> Iterator[list[str]]:
    seen: list[str] = []
    with faults.inject("s3", lambda op, **_: seen.append(op), at=None):
        yield seen


def wanted(key: str, *numbers: int, skip: int = 0) -> list[Wanted]:
    """Tensors of a pack, without the first ``skip`` bytes of each."""
    return [Wanted(key, n * TENSOR + skip, bytearray(TENSOR - skip)) for n in numbers]


def is_right(rows: list[Wanted]) -> None:
    for one in rows:
        assert one.out == DATA[one.start : one.start + len(one.out)]


# -- what is moved ---------------------------------------------------------------------------


def test_a_small_object_is_one_request_each_way(wired: tuple[S3Keeper, Wire]) -> None:
    keeper, wire = wired
    keeper.put("small", [b"12", b"345"])
    assert wire.requests == ["PUT"]
    keeper.put("small", [b"123", b"45"], replace=True)
    assert wire.requests == ["PUT", "PUT"]
    wire.reset()
    assert keeper.get("small") == b"12345"
    assert wire.requests == ["GET"]
    wire.reset()
    with pytest.raises(AlreadyThere):
        keeper.put("small", [b"6"])
    assert wire.requests == ["PUT", "HEAD"]  # was it we?


@pytest.mark.parametrize("share", [0.25, 0.5, 0.75, 1.0])
def test_a_partial_load_is_one_request_for_what_was_asked(
    wired: tuple[S3Keeper, Wire], share: float
) -> None:
    keeper, wire = wired
    keeper.put("pack", [DATA])
    rows = wanted("pack", *range(int(100 * share)))
    wire.reset()
    keeper.read(rows)
    is_right(rows)
    assert wire.requests == ["GET"]
    assert wire.received <= 1.1 * sum(len(one.out) for one in rows)


def test_gaps_are_read_over_as_long_as_they_are_a_tenth(wired: tuple[S3Keeper, Wire]) -> None:
    keeper, wire = wired
    keeper.put("pack", [DATA])
    rows = wanted("pack", *range(50), skip=4096)  # padding, or norms nobody wants
    wire.reset()
    keeper.read(rows)
    is_right(rows)
    assert wire.requests == ["GET"]
    assert wire.received <= 1.1 * sum(len(one.out) for one in rows)
    rows = wanted("pack", *range(0, 100, 4))
    wire.reset()
    with requests() as seen:
        keeper.read(rows)
    is_right(rows)
    assert seen == ["read"], "one operation"
    assert wire.requests == ["GET"] * 25  # S3 knows no request for several ranges
    assert wire.received <= 1.1 * sum(len(one.out) for one in rows)


def test_objects_are_a_request_each(wired: tuple[S3Keeper, Wire]) -> None:
    keeper, wire = wired
    for n in range(3):
        keeper.put(f"pack/{n}", [DATA])
    rows = [one for n in range(3) for one in wanted(f"pack/{n}", *range(10 * n, 10 * n + 5))]
    wire.reset()
    keeper.read(rows)
    is_right(rows)
    assert wire.requests == ["GET"] * 3


def test_a_long_run_is_cut_into_requests_side_by_side(wired: tuple[S3Keeper, Wire]) -> None:
    keeper, wire = wired
    data = np.random.default_rng(5).bytes(40 * 2**20)
    keeper.put("long", [data])
    out = bytearray(len(data) - 7)
    wire.reset()
    keeper.read([Wanted("long", 7, out)])
    assert out == data[7:]
    assert wire.requests == ["GET"] * 3
    wire.reset()
    keeper.objects.read("long", 7, memoryview(out)[: 9 * 2**20])  # as tiers do
    assert out == data[7:]
    assert wire.requests == ["GET"] * 3


def test_more_than_the_limit_is_not_transferred(wired: tuple[S3Keeper, Wire]) -> None:
    keeper, wire = wired
    keeper.put("pack", [DATA] * 5)
    wire.reset()
    with pytest.raises(StorageError, match="40960000 bytes"):
        keeper.get("pack", limit=1000)
    assert wire.received < 2.5 * len(DATA)  # what was on its way already


def test_an_upload_takes_memory_as_it_is(
    keeper: S3Keeper, short_parts: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Large parts are sent from the caller's memory, and it is the caller's again after write."""
    sent: list[Any] = []
    real = Multipart.send

    def noted(self: Multipart, name: str, upload: str, number: int, part: Any) -> str:
        sent.append(part.data().obj)
        return real(self, name, upload, number, part)

    monkeypatch.setattr(Multipart, "send", noted)
    array = np.random.default_rng(6).integers(0, 255, 2 * MINIMUM, dtype=np.uint8)
    expected = array.tobytes() + b"end"
    with keeper.begin("large", durability=Durability.REPLICATED) as one:
        one.write(array)
        array[:] = 0
        one.write(b"end")
        one.publish()
    assert [body is array for body in sent] == [True, True, False]
    assert keeper.get("large") == expected


# -- who wins --------------------------------------------------------------------------------


def test_uploads_race_in_threads(weed: seaweed.Server, place: str, short_parts: None) -> None:
    """SeaweedFS would let several complete in the same moment."""
    together = threading.Barrier(4)

    def work(me: int) -> bool:
        with S3Keeper(place, **weed.access) as mine, mine.begin("race") as one:
            one.write(bytes([me]) * (MINIMUM + 1))
            together.wait(30)
            try:
                one.publish()
            except AlreadyThere:
                return False
            return True

    with ThreadPoolExecutor(4) as pool:
        won = list(pool.map(work, range(4)))
    assert sum(won) == 1
    with S3Keeper(place, **weed.access) as keeper:
        assert keeper.get("race") == bytes([won.index(True)]) * (MINIMUM + 1)
        assert keeper.objects.names() == ["race"], "a claim is left"
        assert keeper.multipart.open_uploads() == []


def test_a_claim_whose_writer_died_is_waited_for_and_passed(
    keeper: S3Keeper, short_parts: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claims, "_PATIENCE", 0.5)
    assert keeper.claims.get("a", "of a writer that died")
    with keeper.begin("a") as one:
        one.write(bytes(MINIMUM + 1))
        one.publish()
    assert keeper.size("a") == MINIMUM + 1
    assert keeper.objects.names() == ["a"]
    with keeper.begin("a", replace=True) as one:  # whoever may replace needs no claim
        one.write(bytes(MINIMUM + 2))
        one.publish()
    assert keeper.size("a") == MINIMUM + 2


def test_a_slow_claimant_does_not_complete_over_the_next(
    keeper: S3Keeper, short_parts: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claims, "_PATIENCE", 0.2)

    def other(**_: object) -> None:
        with keeper.begin("a") as second:
            second.write(bytes(MINIMUM + 1))
            second.publish()

    with (
        faults.inject("s3", other, when=lambda op, **_: op == "complete_upload"),
        keeper.begin("a") as first,
    ):
        first.write(b"?" * (MINIMUM + 1))
        with pytest.raises(AlreadyThere):
            first.publish()
    assert keeper.get("a") == bytes(MINIMUM + 1)
    assert keeper.objects.names() == ["a"]


@pytest.mark.parametrize("nbytes", [10, MINIMUM + 1], ids=["one request", "an upload"])
def test_a_publish_whose_answer_got_lost(
    keeper: S3Keeper, short_parts: None, monkeypatch: pytest.MonkeyPatch, nbytes: int
) -> None:
    """It is asked for again, and the server says that there is an object: our own."""
    body, complete = keeper.objects._put_body, keeper.multipart.complete

    def twice(*args: Any, **options: Any) -> None:
        body(*args, **options)
        body(*args, **options)

    def completed_twice(*args: Any, **options: Any) -> None:
        complete(*args, **options)
        complete(*args, **options)

    with keeper.begin("a", nbytes) as one:
        monkeypatch.setattr(keeper.multipart, "complete", completed_twice)
        one.write(bytes(nbytes))
        if nbytes == 10:
            monkeypatch.setattr(keeper.objects, "_put_body", twice)
        one.publish()
    monkeypatch.undo()
    assert keeper.size("a") == nbytes
    with pytest.raises(AlreadyThere):
        keeper.put("a", [bytes(nbytes)])


# -- what dead writers leave -------------------------------------------------------------------


def test_uploads_are_swept_by_when_they_last_got_a_part(
    keeper: S3Keeper, short_parts: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    with keeper.begin("alive") as one:
        one.write(bytes(MINIMUM))
        upload = keeper.multipart.begin("dead")
        assert keeper.sweep() == 0
        # Half an hour on, the one goes on and the other does not.
        now = time.time()
        started = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(now - 4000))
        real = keeper.multipart.open_uploads
        monkeypatch.setattr(
            keeper.multipart,
            "open_uploads",
            lambda folder="": [type(u)(u.name, u.upload, started) for u in real(folder)],
        )
        assert keeper.sweep() == 1
        one.write(bytes(MINIMUM))
        one.publish()
    assert upload
    assert keeper.size("alive") == 2 * MINIMUM
    assert real() == []


def test_old_claims_are_swept(keeper: S3Keeper) -> None:
    assert keeper.claims.get("a", "mark")
    assert list(keeper.list()) == []
    keeper.sweep()
    assert keeper.objects.names() == [".claims/a/00000000"]
    keeper.sweep(quiet=-60.0)
    assert keeper.objects.names() == []


@pytest.mark.parametrize("op", ["upload_part", "complete_upload", "create_upload", "create"])
def test_an_upload_that_fails_leaves_nothing(keeper: S3Keeper, short_parts: None, op: str) -> None:
    def fail(**_: object) -> None:
        raise StorageError("as the server says it")

    with (
        faults.inject("s3", fail, when=lambda op, want=op, **_: op == want),
        pytest.raises(StorageError, match="as the server says it"),
    ):
        keeper.put("a", [bytes(MINIMUM), bytes(10)])
    assert keeper.multipart.open_uploads() == []
    assert keeper.objects.names() == []
    keeper.put("a", [bytes(MINIMUM), bytes(10)])


def write_upload(place: str) -> None:
    """In a process of its own: the access comes from the environment."""
    draft.PART = MINIMUM
    with S3Keeper(place, timeout=20.0, retries=2) as keeper:
        keeper.put("a", [bytes(MINIMUM), b"end"])


@pytest.mark.parametrize("op", ["upload_part", "create", "complete_upload", "delete"])
def test_a_writer_killed_at_a_request_of_its_upload(
    weed: seaweed.Server, place: str, short_parts: None, monkeypatch: pytest.MonkeyPatch, op: str
) -> None:
    env = {**weed.environment, ENV: f"s3:kill@1[op={op}]"}
    (outcome,) = ranks.spawn(write_upload, 1, place, env=env, expect_errors=True)
    assert outcome.signal is not None
    monkeypatch.setattr(claims, "_PATIENCE", 0.3)
    with S3Keeper(place, **weed.access) as keeper:
        keys = [entry.key for entry in keeper.list()]
        assert keys == (["a"] if op == "delete" else [])  # its claim, when all was done
        if not keys:
            keeper.put("a", [bytes(MINIMUM), b"new"])
        assert keeper.get("a") == bytes(MINIMUM) + (b"end" if keys else b"new")
        keeper.sweep(quiet=-60.0)
        assert keeper.objects.names() == ["a"]
        assert keeper.multipart.open_uploads() == []


# -- errors ----------------------------------------------------------------------------------


def test_a_truncated_object_is_found(keeper: S3Keeper) -> None:
    keeper.put("a", [bytes(1000)])
    keeper.objects.put("a", bytes(900))
    with pytest.raises(Truncated, match="ends at byte 900"):
        keeper.read([Wanted("a", 0, bytearray(1000))])
    with pytest.raises(Truncated):
        keeper.read([Wanted("a", 950, bytearray(10))])
    with pytest.raises(NotFound):
        keeper.read([Wanted("b", 0, bytearray(0))])


def test_bytes_of_two_objects_are_never_mixed(
    keeper: S3Keeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    keeper.put("a", [bytes(1000)])
    real = keeper.objects._range

    def slow(name: str, start: int, nbytes: int) -> Any:
        if start == 900:
            keeper.put("a", [b"?" * 1000], replace=True)
        return real(name, start, nbytes)

    monkeypatch.setattr(keeper.objects, "_range", slow)
    rows = [Wanted("a", at, bytearray(50)) for at in (0, 900)]
    with pytest.raises(StorageError, match="was replaced while it was read"):
        keeper.read(rows)
    keeper.read(rows)


def test_nobody_answers(weed: seaweed.Server) -> None:
    access = {**weed.access, "endpoint": "http://127.0.0.1:9"}
    with (
        S3Keeper("s3://bucket/x", **access, timeout=2.0, retries=0) as keeper,
        pytest.raises(Unreachable, match="AWS_ENDPOINT_URL"),
    ):
        keeper.get("a")


def test_there_is_no_bucket(weed: seaweed.Server) -> None:
    with (
        S3Keeper("s3://absent/x", **weed.access, timeout=5.0, retries=0) as keeper,
        pytest.raises(StorageError, match="no bucket 'absent'"),
    ):
        keeper.put("a", [b"1"])


def test_options_that_are_not_known(weed: seaweed.Server, place: str) -> None:
    with pytest.raises(ConfigError, match=r"does not take .*colour"):
        open_keeper(place, **weed.access, colour="red")


def test_the_claims_of_a_prefix_are_no_objects(keeper: S3Keeper) -> None:
    keeper.objects.put("no key", b"1")
    keeper.objects.put(".hidden", b"1")
    keeper.put("a", [b"1"])
    assert [entry.key for entry in keeper.list()] == ["a"]
