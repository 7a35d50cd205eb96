"""Checks of reading ranges, and of what can be had without a copy."""

from __future__ import annotations

import os
import random

import numpy as np

from sapwood.errors import AlreadyThere, CannotMap, NotFound, Truncated, UsageError
from sapwood.storage.base import Adopting, Keeper, Linkable, Mappable, Shareable, Wanted
from sapwood.testing.storage.common import Opener, content, expect, opened, read_at

__all__ = [
    "check_adopting",
    "check_links",
    "check_mapping",
    "check_ranges",
    "check_sharing",
]

_NBYTES = 300_000


def check_ranges(opener: Opener) -> None:
    """Any ranges, of any objects, in any order; none beyond the end of an object."""
    chance = random.Random(7)
    with opened(opener) as keeper:
        data = {f"range/{n}": content(n, _NBYTES + n) for n in range(3)}
        for key, bytes_there in data.items():
            keeper.put(key, [bytes_there])
        _read_all(keeper, data, [(key, 0, len(there)) for key, there in data.items()])
        for most in (1, 50, 5_000, 100_000):
            rows = []
            for _ in range(200):
                key = chance.choice(list(data))
                start = chance.randrange(len(data[key]) - most)
                rows.append((key, start, chance.randrange(most + 1)))
            _read_all(keeper, data, rows)
        row = [("range/0", at, 100) for at in range(0, _NBYTES, 150)]
        _read_all(keeper, data, row)  # more than a system call takes
        _read_all(keeper, data, [("range/0", _NBYTES, 0), ("range/0", 0, 0)])
        keeper.read([])
        for start, nbytes in ((_NBYTES, 1), (_NBYTES - 5, 6), (0, _NBYTES + 1), (10**12, 1)):
            with expect(Truncated, f"reading {start}+{nbytes} of {_NBYTES} bytes"):
                read_at(keeper, "range/0", start, nbytes)
        with expect(Truncated, "an empty range behind the end"):
            read_at(keeper, "range/0", _NBYTES + 1, 0)
        with expect(UsageError, "reading from a negative offset"):
            read_at(keeper, "range/0", -1, 2)
        with expect(UsageError, "reading into what cannot be written"):
            keeper.read([Wanted("range/0", 0, b"fixed")])
        with expect(NotFound, "reading an object that is not there"):
            keeper.read([Wanted("range/0", 0, bytearray(5)), Wanted("range/9", 0, bytearray(5))])
        _ask(keeper, data)


def _read_all(keeper: Keeper, data: dict[str, bytes], rows: list[tuple[str, int, int]]) -> None:
    wanted = [Wanted(key, start, bytearray(nbytes)) for key, start, nbytes in rows]
    keeper.read(wanted)
    for one in wanted:
        expected = data[one.key][one.start : one.start + len(one.out)]
        assert one.out == expected, f"{len(one.out)} bytes of {one.key} from {one.start} on"


def _ask(keeper: Keeper, data: dict[str, bytes]) -> None:
    outs = [np.zeros(1000, np.uint8) for _ in range(3)]
    jobs = [keeper.ask([Wanted(key, 7, out)]) for key, out in zip(sorted(data), outs, strict=True)]
    for key, out, job in zip(sorted(data), outs, jobs, strict=True):
        job.wait()
        assert out.tobytes() == data[key][7:1007]
        job.close()
    never = keeper.ask([Wanted("range/absent", 0, bytearray(1))])
    with expect(NotFound, "waiting for an object that is not there"):
        never.wait()
    large = bytearray(_NBYTES)
    job = keeper.ask([Wanted("range/0", 0, large)])
    job.close()
    before = bytes(large)
    keeper.read([Wanted("range/1", 0, bytearray(10))])
    assert large == before, "a buffer was written to after its request was closed"


def check_mapping(opener: Opener) -> None:
    """Mapped bytes are those of the object, also once it is gone; writing to them is private."""
    with opened(opener) as keeper:
        assert isinstance(keeper, Mappable)
        for nbytes in (0, 100, 500_000):
            key, data = f"map/{nbytes}", content(nbytes, nbytes)
            keeper.put(key, [data])
            with keeper.map(key) as mapped:
                assert mapped.data == data
                assert mapped.data.readonly
            with keeper.map(key, writable=True) as mapped:
                assert mapped.data == data
                mapped.data[:] = bytes(nbytes)
                assert mapped.data == bytes(nbytes)
                assert keeper.get(key) == data, "a private change reached the object"
            first, second = keeper.map(key), keeper.map(key, writable=True)
            array = np.frombuffer(second.data, np.uint8) if nbytes else np.empty(0, np.uint8)
            keeper.put(key, [b"another"], replace=True)
            keeper.remove([key])
            assert first.data == data, "a mapping did not outlive its object"
            first.close()
            first.close()
            second.close()
            assert array.tobytes() == data, "an array did not outlive its mapping's close"
        with expect(NotFound, "mapping what is not there"):
            keeper.map("map/absent")
        keeper.put("map/last", [content(1, 100_000)])
        last = keeper.map("map/last")
    assert last.data == content(1, 100_000), "a mapping did not outlive its keeper"
    last.close()


def check_sharing(opener: Opener) -> None:
    """A descriptor gives the bytes, outlives the object, and cannot be used to change it."""
    with opened(opener) as keeper:
        assert isinstance(keeper, Shareable)
        for nbytes in (0, 100, 500_000):
            key, data = f"share/{nbytes}", content(nbytes, nbytes)
            keeper.put(key, [data])
            found = keeper.descriptor(key)
            try:
                assert found.nbytes == nbytes
                with expect(OSError, "writing through a descriptor"):
                    os.pwrite(found.fd, b"x", found.offset)
                keeper.remove([key])
                assert os.pread(found.fd, nbytes, found.offset) == data
            finally:
                os.close(found.fd)
        with expect(NotFound, "a descriptor of what is not there"):
            keeper.descriptor("share/absent")


def check_links(opener: Opener) -> None:
    """A second key has the same bytes, and each can be removed by itself."""
    with opened(opener) as keeper:
        assert isinstance(keeper, Linkable)
        for nbytes in (10, 200_000):
            data = content(nbytes, nbytes)
            keeper.put("link/a", [data])
            keeper.link("link/a", "link/deep/b")
            with expect(AlreadyThere, "linking to a key that is taken"):
                keeper.link("link/a", "link/deep/b")
            keeper.remove(["link/a"])
            assert keeper.get("link/deep/b") == data
            with expect(NotFound, "linking what is not there"):
                keeper.link("link/a", "link/c")
            keeper.remove(["link/deep/b"])


def check_adopting(opener: Opener) -> None:
    """Adopted memory is kept where it is, and given back when nobody can see it any more."""
    with opened(opener) as keeper:
        assert isinstance(keeper, Adopting)
        memory = np.frombuffer(bytearray(content(1, 200_000)), np.uint8)
        given: list[str] = []
        keeper.adopt("lent/a", memory, given_back=lambda: given.append("a"))
        with expect(AlreadyThere, "adopting under a key that is taken"):
            keeper.adopt("lent/a", memory, given_back=lambda: given.append("never"))
        assert keeper.get("lent/a") == memory.tobytes()
        assert read_at(keeper, "lent/a", 1000, 50) == memory[1000:1050].tobytes()
        if isinstance(keeper, Mappable):
            mapped = keeper.map("lent/a")
            array = np.frombuffer(mapped.data, np.uint8)
            assert array.ctypes.data == memory.ctypes.data, "it was copied"
            keeper.remove(["lent/a"])
            mapped.close()
            assert given == [], "memory was given back while an array shows it"
            del array
        keeper.remove(["lent/a"])
        assert given == ["a"]
        keeper.adopt("lent/b", memory, given_back=lambda: given.append("b"))
        keeper.put("lent/b", [b"x"], replace=True)
        assert given == ["a", "b"]
        keeper.adopt("lent/c", memory, given_back=lambda: given.append("c"))
    assert given == ["a", "b", "c"]


def check_cannot_map(opener: Opener) -> None:
    """A keeper that cannot map now says so, and reads."""
    with opened(opener) as keeper:
        keeper.put("far/a", [b"12345"])
        assert isinstance(keeper, Mappable)
        assert isinstance(keeper, Shareable)
        with expect(CannotMap, "mapping"):
            keeper.map("far/a")
        with expect(CannotMap, "sharing"):
            keeper.descriptor("far/a")
        assert read_at(keeper, "far/a", 1, 3) == b"234"
