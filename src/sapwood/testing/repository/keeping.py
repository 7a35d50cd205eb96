"""Checks of saving, names and reading."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from threading import Barrier

from sapwood.errors import ModelExists, ModelNotFound, SapwoodError, StoreError
from sapwood.repository.base import BlobPart
from sapwood.repository.names import Reference, parse
from sapwood.storage import Durability
from sapwood.testing.repository.common import (
    Opener,
    content,
    expect,
    gc,
    new_model,
    opened,
    problems_of,
    read_all,
    references,
    save,
)

__all__ = [
    "check_closed",
    "check_names",
    "check_nothing_of_what_failed",
    "check_round_trip",
    "check_tags",
    "check_threads",
    "check_unknown",
]

_SIZES = (0, 1, 63, 64, 4097, 65_537, 2**20, 3 * 2**20 + 5)


def check_round_trip(opener: Opener) -> None:
    """Bytes of any size come back, all of them and in parts, also in another back end there."""
    tensors = {f"t{n}": content(n, size) for n, size in enumerate(_SIZES)}
    tensors |= {"odd name \n\u00e4\udcff": b"x", "tied": tensors["t4"], "again": tensors["t0"]}
    with opened(opener) as backend:
        record = save(backend, "trip/a@1", tensors, note={"by": ["me"]}, metrics={"m": -0.5})
        assert (record.name, record.version, record.removed) == ("trip/a", "1", None)
        assert record.nbytes == sum(_SIZES) + 1, "tied tensors count once"
        assert record.tensors == len(tensors)
        found, manifest = backend.manifest(parse("trip/a@1"))
        assert found == record == backend.find(parse("trip/a"))
        assert (found.note, found.metrics) == ({"by": ["me"]}, {"m": -0.5})
        assert [name for name, _ in manifest.names] == list(tensors)
        assert manifest.structure == {"of": "trip/a@1"}
        assert manifest.graph == b"graph of trip/a@1"
        assert read_all(backend, "trip/a@1") == tensors
        big = manifest.blobs[manifest.by_name["t7"]]
        rows = [(0, 10), (5, 0), (_SIZES[7] - 3, 3), (4095, 70_000), (2**20, 2**20), (0, 10)]
        parts = [BlobPart(big, at, memoryview(bytearray(size))) for at, size in rows]
        backend.read(parts)
        for part in parts:
            assert part.out == tensors["t7"][part.start : part.start + len(part.out)]
        for start, size in ((_SIZES[7], 1), (-1, 1), (0, _SIZES[7] + 1)):
            with expect(SapwoodError, f"reading {size} bytes at {start} of {_SIZES[7]}"):
                backend.read([BlobPart(big, start, memoryview(bytearray(size)))])
        backend.read([])
        save(backend, "trip/none@1", {})
        assert read_all(backend, "trip/none") == {}
        assert problems_of(backend) == []


def check_names(opener: Opener) -> None:
    """Versions never change, a bare name is the latest, and numbers are not given twice."""
    with opened(opener) as backend:
        first = save(backend, "n/a@9", {"t": b"nine"})
        second = save(backend, "n/a@x", {"t": b"x"})
        assert second.id > first.id
        with expect(ModelExists, "saving a version again"):
            save(backend, "n/a@9", {"t": b"other"})
        assert read_all(backend, "n/a@9") == {"t": b"nine"}
        assert backend.find(parse("n/a")).version == "x"
        assert save(backend, "n/a", {"t": b"ten"}).version == "10"
        backend.remove(parse("n/a@10"))
        assert backend.find(parse("n/a")).version == "x"
        assert save(backend, "n/a", {"t": b"11"}).version == "11", "a number was given twice"
        again = save(backend, "n/a@10", {"t": b"again"})
        assert again.id > second.id
        assert read_all(backend, "n/a@10") == {"t": b"again"}
        given = replace(new_model("n/given@1", {"t": b"1"}), id=again.id + 5)
        assert backend.save(given, [memoryview(b"1")], {}, Durability.MEMORY).id == again.id + 5
        for name in ("n/a/b", "n", "n/a.b", "n/" + "x" * 198):
            save(backend, f"{name}@1", {"t": name.encode()})
        assert references(backend, "n/a") == ["n/a@9", "n/a@x", "n/a@11", "n/a@10"]
        assert references(backend, "n/a?*") == ["n/a.b@1", "n/a/b@1"]
        assert len(references(backend)) == 9
        assert read_all(backend, "n/a/b") == {"t": b"n/a/b"}


def check_tags(opener: Opener) -> None:
    """Tags move, go with their version, and are no versions."""
    with opened(opener) as backend:
        one = save(backend, "t@1", {"t": b"1"}, tags=["best", "first"])
        assert one.tags == ("best", "first")
        save(backend, "t@2", {"t": b"2"}, tags=["best"])
        assert backend.find(parse("t@best")).version == "2"
        assert backend.find(parse("t@1")).tags == ("first",)
        assert backend.tag(parse("t@1"), "best").tags == ("best", "first")
        assert read_all(backend, "t@best") == {"t": b"1"}
        assert backend.tag(parse("t@best"), "same").version == "1"
        with expect(ModelExists, "a tag with the name of a version"):
            backend.tag(parse("t@2"), "1")
        with expect(ModelExists, "a version with the name of a tag"):
            save(backend, "t@best", {"t": b"3"})
        with expect(ModelNotFound, "tagging what is not there"):
            backend.tag(parse("t@3"), "best")
        backend.untag("t", "same")
        with expect(ModelNotFound, "removing a tag that is not there"):
            backend.untag("t", "same")
        backend.remove(parse("t@first"))
        with expect(ModelNotFound, "a tag of what was removed"):
            backend.find(parse("t@best"))
        assert references(backend) == ["t@2"]


def check_unknown(opener: Opener) -> None:
    """What is not there is said, with what is like it."""
    with opened(opener) as backend:
        with expect(ModelNotFound, "finding in an empty repository"):
            backend.find(parse("a"))
        assert references(backend) == []
        save(backend, "nt3/run7@step-500", {"t": b"1"})
        for text, like in (("nt3/run8@1", "nt3/run7"), ("nt3/run7@step-50", "step-500")):
            for call in (backend.find, backend.manifest, backend.remove):
                told = _refusal(call, text)
                assert like in told, f"{told}: it does not say that there is {like}"
        with expect(ModelNotFound, "a number that there never was"):
            backend.by_id(7, "nt3/run7")
        with expect(StoreError, "a blob that there never was"):
            backend.read([BlobPart(10**9, 0, memoryview(bytearray(1)))])


def _refusal(call: Callable[[Reference], object], text: str) -> str:
    try:
        call(parse(text))
    except ModelNotFound as error:
        return str(error)
    raise AssertionError(f"{text} is not there, and nothing was said")


def check_nothing_of_what_failed(opener: Opener) -> None:
    """A save that is refused leaves nothing to be seen, and nothing that gc does not remove."""
    with opened(opener) as backend:
        save(backend, "f@1", {"t": content(1, 5000)})
        with expect(ModelExists, "saving a version again"):
            save(backend, "f@1", {"t": content(2, 300_000), "u": content(3, 10)}, tags=["new"])
        with expect(ModelNotFound, "the tag of a save that failed"):
            backend.find(parse("f@new"))
        assert references(backend) == ["f@1"]
        assert gc(backend).live == 5000
        assert gc(backend).packs == 0, "gc leaves something to the next one"
        assert read_all(backend, "f@1") == {"t": content(1, 5000)}


def check_threads(opener: Opener, threads: int = 4) -> None:
    """Threads share a back end: of savers of one version one wins; all get different numbers."""
    rounds = 4
    together = Barrier(threads)
    with opened(opener) as backend:

        def work(me: int) -> list[bool]:
            won = []
            for turn in range(rounds):
                together.wait(60)
                save(backend, "thr/bare", {"t": content(me, 3000)})
                try:
                    save(backend, f"thr/one@{turn}", {"t": content(me, 3000)})
                    won.append(True)
                except ModelExists:
                    won.append(False)
                found = read_all(backend, f"thr/one@{turn}")["t"]
                assert found in [content(n, 3000) for n in range(threads)], "mixed bytes"
            return won

        with ThreadPoolExecutor(threads) as pool:
            won = list(pool.map(work, range(threads)))
        for turn in range(rounds):
            first = [me for me in range(threads) if won[me][turn]]
            assert len(first) == 1, f"round {turn}: {first} were all told that they had saved it"
            assert read_all(backend, f"thr/one@{turn}") == {"t": content(first[0], 3000)}
        bare = [int(record.version) for record in backend.models("thr/bare")]
        assert bare == list(range(1, threads * rounds + 1)), "numbers by which versions came"
        assert problems_of(backend) == []


def check_closed(opener: Opener) -> None:
    """A back end that was closed says so; what it kept is there."""
    backend = opener()
    save(backend, "c@1", {"t": b"1"})
    backend.close()
    backend.close()
    with expect(SapwoodError, "asking what was closed"):
        backend.models()
    with expect(SapwoodError, "saving to what was closed"):
        save(backend, "c@2", {"t": b"1"})
