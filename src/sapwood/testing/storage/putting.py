"""Checks of how objects come and go."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import numpy as np

from sapwood.errors import (
    AlreadyThere,
    BadKey,
    ConfigError,
    Damaged,
    NotFound,
    Truncated,
    UsageError,
)
from sapwood.storage.base import Durability, Keeper, Wanted
from sapwood.testing.storage.common import Opener, content, expect, keys_in, opened, read_at

__all__ = [
    "check_drafts",
    "check_durability",
    "check_keys",
    "check_list",
    "check_publishing",
    "check_remove",
    "check_replacing",
    "check_round_trip",
    "check_threads",
]

_SIZES = (0, 1, 63, 4095, 4096, 65_535, 65_536, 3 * 2**20 + 5)
GOOD_KEYS = ("a", "A-1", "0", "x.y_z+1@2=3", "deep/er/and/deep.er/still", "w/" + "n" * 200)
BAD_KEYS = (
    "",
    "/",
    "/absolute",
    "a/",
    "a//b",
    "..",
    "../a",
    "a/../b",
    "a/..",
    ".",
    "a/./b",
    ".hidden",
    "a/.drafts",
    "-option",
    "a b",
    "a\nb",
    "a\0b",
    "a\x7fb",
    "a\\b",
    "a:b",
    "a\u0308",
    "\udcff",
    "a%2e",
    "n" * 201,
    "/".join(["n" * 100] * 9),
)


def check_round_trip(opener: Opener) -> None:
    """Objects of any size and from any buffers come back, all of them and in parts."""
    with opened(opener) as keeper:
        for number, nbytes in enumerate(_SIZES):
            key, data = f"trip/{number}", content(number, nbytes)
            keeper.put(key, [data])
            assert keeper.size(key) == nbytes, f"{nbytes} bytes were put, not {keeper.size(key)}"
            assert keeper.get(key) == data
            assert read_at(keeper, key, 0, nbytes) == data
        array = np.arange(50_000, dtype=np.int32)
        parts = [b"head", bytearray(b"er"), memoryview(b"--"), array, b"", array[:7]]
        keeper.put("trip/parts", parts)
        assert keeper.get("trip/parts") == b"".join(bytes(part) for part in parts)
        keeper.put("trip/many", [content(n, 1000) for n in range(3000)])
        assert read_at(keeper, "trip/many", 2_999_000, 1000) == content(2999, 1000)
        keeper.put("trip/none", [])
        assert keeper.get("trip/none") == b""
        with expect(UsageError, "putting what lies scattered"):
            keeper.put("trip/scattered", [array[::2]])
        with expect(OSError, "getting more than the limit"):
            keeper.get("trip/parts", limit=10)
        with expect(NotFound, "getting what is not there"):
            keeper.get("trip/absent")
        with expect(NotFound, "the size of what is not there"):
            keeper.size("trip/absent")


def check_keys(opener: Opener) -> None:
    """Every good key works; every bad one is refused by every call, and nothing is made of it."""
    with opened(opener) as keeper:
        for key in GOOD_KEYS:
            keeper.put(f"keys/{key}", [key.encode()])
            assert keeper.get(f"keys/{key}") == key.encode()
        assert keys_in(keeper, "keys") == sorted(f"keys/{key}" for key in GOOD_KEYS)
        before = keys_in(keeper)
        keys: tuple[object, ...] = (*BAD_KEYS, None, 7, b"bytes")
        for bad in keys:
            for name, call in _calls(keeper, bad).items():
                if not (name == "list" and bad == ""):
                    with expect(BadKey, f"{name} of {bad!r}"):
                        call()
        assert keys_in(keeper) == before


def _calls(keeper: Keeper, key: object):  # type: ignore[no-untyped-def]
    bad: str = key  # type: ignore[assignment]
    return {
        "begin": lambda: keeper.begin(bad, 1),
        "put": lambda: keeper.put(bad, [b"x"]),
        "replace": lambda: keeper.put(bad, [b"x"], replace=True),
        "size": lambda: keeper.size(bad),
        "get": lambda: keeper.get(bad),
        "read": lambda: keeper.read([Wanted(bad, 0, bytearray(1))]),
        "ask": lambda: keeper.ask([Wanted(bad, 0, bytearray(1))]),
        "list": lambda: keeper.list(bad),
        "remove": lambda: keeper.remove(["keys/a", bad]),
    }


def check_publishing(opener: Opener) -> None:
    """An object is never replaced unless that was asked for, and a draft is seen by nobody."""
    with opened(opener) as keeper:
        keeper.put("pub/a", [b"one"])
        with expect(AlreadyThere, "putting a second object under a key"):
            keeper.put("pub/a", [b"two"])
        assert keeper.get("pub/a") == b"one"
        keeper.put("pub/a", [b"longer than before"], replace=True)
        assert keeper.get("pub/a") == b"longer than before"
        keeper.put("pub/a", [b"3"], replace=True)
        assert keeper.get("pub/a") == b"3"
        assert keeper.size("pub/a") == 1
        with keeper.begin("pub/late", 4) as late:
            late.write(b"late")
            with expect(NotFound, "reading a draft"):
                keeper.get("pub/late")
            assert keys_in(keeper, "pub") == ["pub/a"], "a draft is listed"
            keeper.put("pub/late", [b"first"])
            with expect(AlreadyThere, "publishing where another came first"):
                late.publish()
        assert keeper.get("pub/late") == b"first"
        with keeper.begin("pub/sealed") as draft:
            draft.write_parts([b"a", b"b"])
            job = draft.seal()
            with expect(UsageError, "writing to a sealed draft"):
                draft.write(b"c")
            job.wait()
            job.wait()
        assert keeper.get("pub/sealed") == b"ab"
        with keeper.begin("pub/late", 4, replace=True) as second:
            second.write(b"last")
            second.seal().wait()
        assert keeper.get("pub/late") == b"last"


def check_drafts(opener: Opener) -> None:
    """A draft that is not published leaves nothing; sizes that were announced are kept."""
    with opened(opener) as keeper:
        with keeper.begin("draft/a", 10) as draft:
            draft.write(b"12345")
        with expect(UsageError, "writing to a draft that is over"):
            draft.write(b"6")
        with expect(UsageError, "publishing a draft that is over"):
            draft.publish()
        draft.discard()
        with keeper.begin("draft/b", 10) as draft:
            draft.write(b"12345")
            with expect(Truncated, "publishing fewer bytes than announced"):
                draft.publish()
        with keeper.begin("draft/c", 4) as draft:
            draft.write(b"1234")
            with expect(Damaged, "writing more bytes than announced"):
                draft.write(b"5")
        with keeper.begin("draft/d") as draft:
            draft.publish()
        with expect(UsageError, "publishing twice"):
            draft.publish()
        for wrong in (-1, 1.5):
            with expect(UsageError, f"nbytes={wrong}"):
                keeper.begin("draft/e", wrong)  # type: ignore[arg-type]
        memory = bytearray(b"mine")
        with keeper.begin("draft/f") as draft:
            draft.write(memory)
            memory[:] = b"????"
            draft.write(memory)
            memory[:] = b"!!!!"
            draft.publish()
        assert keeper.get("draft/f") == b"mine????", "memory is not the caller's after write"
        assert keys_in(keeper, "draft") == ["draft/d", "draft/f"]
        left = keeper.begin("draft/g")
        left.write(b"x")
    with expect(UsageError, "publishing a draft of a keeper that was closed"):
        left.publish()
    with expect(UsageError, "reading from a keeper that was closed"):
        keeper.get("draft/f")


def check_durability(opener: Opener) -> None:
    """Every level up to the most can be had, and more is refused."""
    with opened(opener) as keeper:
        for level in Durability:
            key = f"level/{level.name}"
            if level <= keeper.durability:
                keeper.put(key, [b"x"], durability=level)
                assert keeper.get(key) == b"x"
                keeper.put(f"{key}-more", [b"y"], durability=level)
                keeper.put(key, [b"z"], durability=level, replace=True)
                keeper.remove([f"{key}-more"], durability=level)
            else:
                with expect(ConfigError, f"asking for {level.name}"):
                    keeper.put(key, [b"x"], durability=level)
        most = [f"level/{level.name}" for level in Durability if level <= keeper.durability]
        assert keys_in(keeper, "level") == sorted(most)


def check_list(opener: Opener) -> None:
    """Lists are in order, and know where a folder ends."""
    keys = ["list/a/1", "list/a/2/3", "list/ab/1", "list/a-b", "list/a.b", "list/a=c/1", "lis"]
    with opened(opener) as keeper:
        assert keys_in(keeper, "list/absent") == []
        for number, key in enumerate(keys):
            keeper.put(key, [bytes(number)])
        mine = [key for key in keys if key != "lis"]
        assert keys_in(keeper, "list") == sorted(mine)
        assert keys_in(keeper, "list/a") == ["list/a/1", "list/a/2/3"]
        assert [key for key in keys_in(keeper) if key.startswith("lis")] == sorted(keys)
        sizes = {entry.key: entry.nbytes for entry in keeper.list()}
        assert all(sizes[key] == number for number, key in enumerate(keys))
        assert all(entry.changed > 1.6e9 for entry in keeper.list()), "times before 2020"
        keeper.remove(keys)
        assert keys_in(keeper, "list") == []


def check_remove(opener: Opener) -> None:
    """What is removed is gone, its key is free, and what is not there is no error."""
    with opened(opener) as keeper:
        for key in ("rm/a", "rm/b", "rm/deep/c"):
            keeper.put(key, [b"1"])
        keeper.remove([])
        keeper.remove(["rm/a", "rm/absent", "rm/deep/c", "absent/deep/er"])
        assert keys_in(keeper, "rm") == ["rm/b"]
        with expect(NotFound, "reading what was removed"):
            keeper.get("rm/a")
        keeper.remove(["rm/a"])
        keeper.put("rm/a", [b"2"])
        keeper.put("rm/deep/c", [b"2"])
        assert keeper.get("rm/a") == keeper.get("rm/deep/c") == b"2"
        with expect(UsageError, "removing a text"):
            keeper.remove("rm")


def check_replacing(opener: Opener) -> None:
    """Whoever gets an object that is being replaced gets one of the two, whole."""
    versions = [content(1, 100), content(2, 70_000)]
    with opened(opener) as keeper:
        keeper.put("turn/a", [versions[0]])

        def replace() -> None:
            for turn in range(100):
                keeper.put("turn/a", [versions[turn % 2]], replace=True)

        with ThreadPoolExecutor(1) as pool:
            job = pool.submit(replace)
            while not job.done():
                assert keeper.get("turn/a") in versions, "a part of an object"
            job.result()


def check_threads(opener: Opener, threads: int = 6) -> None:
    """Threads share a keeper: each finds its own, and of those at one key one wins."""
    rounds = 4
    together = Barrier(threads)
    with opened(opener) as keeper:

        def work(me: int) -> int:
            won = 0
            for turn in range(rounds):
                mine = content(me, 5000 + me)
                keeper.put(f"thr/{turn}/{me}", [mine])
                assert keeper.get(f"thr/{turn}/{me}") == mine
                together.wait(30)
                try:
                    keeper.put(f"thr/{turn}/all", [mine])
                    won += 1
                except AlreadyThere:
                    pass
                together.wait(30)
                keeper.remove([f"thr/{turn}/{me}"])
            return won

        with ThreadPoolExecutor(threads) as pool:
            won = sum(pool.map(work, range(threads)))
        assert won == rounds, f"{won} writers were told that they came first in {rounds} rounds"
        assert keys_in(keeper, "thr") == [f"thr/{turn}/all" for turn in range(rounds)]
