"""Checks with several processes: they race, they are killed, and gc runs beside them."""

from __future__ import annotations

import os
import random
import signal
import tempfile
import time
from pathlib import Path

from sapwood.errors import Gone, ModelExists, ModelNotFound
from sapwood.repository.base import Backend
from sapwood.repository.names import parse
from sapwood.testing import ranks
from sapwood.testing.repository.common import (
    Opener,
    content,
    gc,
    opened,
    problems_of,
    read_all,
    references,
    save,
)

__all__ = ["check_gc_beside_others", "check_killed_savers", "check_racing_savers"]

_SIZES = (1000, 70_000, 200_000)


def check_racing_savers(
    opener: Opener, *, savers: int = 3, rounds: int = 4, timeout: float = 100.0
) -> None:
    """Of processes that save one version in the same moment one wins, and its bytes are there."""
    outcomes = ranks.spawn(_race, savers, opener, rounds, timeout=timeout)
    with opened(opener) as backend:
        for turn in range(rounds):
            first = [me for me in range(savers) if outcomes[me][turn]]
            assert len(first) == 1, f"round {turn}: {first} were all told that they had saved it"
            found = read_all(backend, f"race/one@{turn}")
            assert found == {"t": content(first[0], 70_000)}, f"round {turn}: not the winner's"
        bare = [record.version for record in backend.models("race/bare")]
        assert sorted(map(int, bare)) == list(range(1, savers * rounds + 1)), bare
        gc(backend)
        assert problems_of(backend) == []
        left = gc(backend)
        assert left.packs == 0, "gc leaves something to the next one"


def _race(opener: Opener, rounds: int) -> list[bool]:
    me, won = ranks.rank(), []
    with opened(opener) as backend:
        for turn in range(rounds):
            _meet(backend, f"race/meet/{turn}", me)
            save(backend, "race/bare", {"t": content(10 + me, 1000)})
            try:
                save(backend, f"race/one@{turn}", {"t": content(me, 70_000)})
                won.append(True)
            except ModelExists:
                won.append(False)
    return won


def _meet(backend: Backend, name: str, me: int) -> None:
    """Wait for all others, by means of the back end itself."""
    save(backend, f"{name}@{me}", {})
    deadline = time.monotonic() + 60.0
    while len(backend.models(name)) < ranks.world():
        assert time.monotonic() < deadline, "not all savers came"
        time.sleep(0.001)


def check_killed_savers(
    opener: Opener, *, kills: int = 4, seed: int = 1, timeout: float = 60.0
) -> None:
    """Whatever moment a saver is killed at, what it was told it saved is there, and all is whole.

    What it had begun is seen by nobody, and gc gives its room back.
    """
    chance = random.Random(seed)
    with tempfile.TemporaryDirectory() as folder:
        said = Path(folder, "said")
        for turn in range(kills):
            said.write_text("")
            with ranks.start(_save_forever, 1, opener, str(said), turn) as group:
                group.wait_mark("saved", 0, timeout)
                time.sleep(chance.uniform(0, 0.3))
                group.kill(0, signal.SIGKILL)
                group.wait(timeout)
            _check_after_kill(opener, said.read_text().splitlines())
    with opened(opener) as backend:
        for reference in references(backend):
            backend.remove(parse(reference))
        assert gc(backend).live == 0
        assert problems_of(backend) == []


def _check_after_kill(opener: Opener, said: list[str]) -> None:
    with opened(opener) as backend:
        there = references(backend, "kill/*")
        lines = [line.split() for line in said]
        kept = {line[1] for line in lines if line[0] == "saved"}
        kept -= {line[1] for line in lines if line[0] == "removing"}
        assert kept <= set(there), f"saved, and not there: {sorted(kept - set(there))}"
        for reference in there:
            assert read_all(backend, reference) == _content_of(reference), f"{reference} is mixed"
        assert problems_of(backend) == []
        gc(backend)
        for reference in there:
            assert read_all(backend, reference) == _content_of(reference), f"{reference}: gc"
        assert problems_of(backend) == []
        assert gc(backend).packs == 0, "gc leaves something to the next one"


def _content_of(reference: str) -> dict[str, bytes]:
    """What belongs to a version: every third tensor is that of the version before."""
    number = int(reference.rpartition("-")[2])
    seeds = [number * 10 + n if (number + n) % 3 else 7 + n for n in range(len(_SIZES))]
    return {f"t{n}": content(seeds[n], size) for n, size in enumerate(_SIZES)}


def _save_forever(opener: Opener, said: str, turn: int) -> None:
    out = os.open(said, os.O_WRONLY | os.O_APPEND)
    with opened(opener) as backend:
        for number in range(10**6):
            reference = f"kill/m@{turn}-{number}"
            parent = f"kill/m@{turn}-{number - 1}" if number else None
            save(backend, reference, _content_of(reference), parent=parent, tags=["last"])
            os.write(out, f"saved {reference}\n".encode())
            ranks.mark("saved")
            if number >= 3:
                old = f"kill/m@{turn}-{number - 3}"
                os.write(out, f"removing {old}\n".encode())
                backend.remove(parse(old))
            if number % 4 == 3:
                gc(backend, quiet=3600.0)


def check_gc_beside_others(
    opener: Opener, *, seconds: float = 3.0, seed: int = 1, timeout: float = 60.0
) -> None:
    """Writers, a reader and two gc at once: a read gives what was saved, or says that it is gone.

    Afterwards nothing is wrong.
    """
    roles = (_write, _write, _read, _sweep, _sweep)
    done = ranks.spawn(_play, len(roles), opener, seconds, seed, timeout=seconds + timeout)
    assert all(done), f"somebody did nothing: {done}"
    with opened(opener) as backend:
        for reference in references(backend, "soak/*"):
            assert read_all(backend, reference) == _content_of(reference)
        assert problems_of(backend) == []
        gc(backend)
        assert problems_of(backend) == []


def _play(opener: Opener, seconds: float, seed: int) -> int:
    role = (_write, _write, _read, _sweep, _sweep)[ranks.rank()]
    with opened(opener) as backend:
        _meet(backend, "meet", ranks.rank())
        return role(backend, random.Random(seed + ranks.rank()), time.monotonic() + seconds)


def _write(backend: Backend, chance: random.Random, until: float) -> int:
    me, number = ranks.rank(), 0
    while time.monotonic() < until:
        reference = f"soak/{me}@v-{number}"
        try:
            others = references(backend, "soak/*")
            parent = chance.choice(others) if others else None
            save(backend, reference, _content_of(reference), parent=parent)
        except (ModelNotFound, Gone):  # the parent was removed in this moment
            continue
        if number >= 3:
            backend.remove(parse(f"soak/{me}@v-{number - 3}"))
        number += 1
    return number


def _read(backend: Backend, chance: random.Random, until: float) -> int:
    count = 0
    while time.monotonic() < until:
        others = references(backend, "soak/*")
        if not others:
            continue
        reference = chance.choice(others)
        try:
            found = read_all(backend, reference)
        except (ModelNotFound, Gone):
            assert reference not in references(backend, "soak/*"), f"{reference} is gone, and there"
            continue
        assert found == _content_of(reference), f"{reference}: not what was saved"
        count += 1
    return count


def _sweep(backend: Backend, chance: random.Random, until: float) -> int:
    count = 0
    while time.monotonic() < until:
        gc(backend, quiet=3600.0)
        count += 1
        time.sleep(chance.uniform(0, 0.05))
    return count
