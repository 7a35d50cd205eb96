"""Long versions of the shipped checks of back ends: savers killed, gc beside readers and writers.

    python scripts/soak_backends.py folder objects s3 mooncake --minutes 10

Each round has a place and a seed of its own; a failure names both.
"""

from __future__ import annotations

import argparse
import functools
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from sapwood.repository.base import Backend
from sapwood.repository.folder import open_folder
from sapwood.repository.objects.opening import open_objects
from sapwood.storage import open_keeper
from sapwood.storage.folder import FolderKeeper
from sapwood.testing import mooncake, ranks, seaweed
from sapwood.testing import repository as suite

BUCKET = "soak"


def in_folder(folder: Path) -> Backend:
    """A folder with a database."""
    return open_folder(FolderKeeper(folder), str(folder), create=True)


def on_objects(place: str, options: dict[str, object]) -> Backend:
    """Objects alone, wherever."""
    return open_objects(open_keeper(place, **options), place, create=True)


@contextmanager
def places(kind: str, folder: Path) -> Iterator[Callable[[str], suite.Opener]]:
    """Openers of places that nobody else uses, by name."""
    if kind == "folder":
        yield lambda name: functools.partial(in_folder, folder / name)
    elif kind == "objects":
        yield lambda name: functools.partial(on_objects, str(folder / name), {})
    elif kind == "s3":
        with seaweed.serve(folder / "weed") as server:
            server.make_bucket(BUCKET)
            access = dict(server.access)
            yield lambda name: functools.partial(on_objects, f"s3://{BUCKET}/{name}", access)
    else:
        with mooncake.serve(folder / "moon", 2**30) as cluster:
            yield lambda name: functools.partial(on_objects, cluster.place(name), {})


def soak(kind: str, minutes: float, seed: int) -> int:
    """Rounds of both checks until the time is over; how many."""
    until = time.monotonic() + 60 * minutes
    rounds = 0
    with (
        tempfile.TemporaryDirectory() as folder,
        places(kind, Path(folder)) as opener,
    ):
        while time.monotonic() < until:
            number = seed + rounds
            try:
                suite.check_gc_beside_others(opener(f"gc-{number}"), seconds=30.0, seed=number)
                suite.check_killed_savers(opener(f"kill-{number}"), kills=15, seed=number)
            except BaseException:
                print(f"{kind}: seed {number} failed")
                raise
            rounds += 1
            print(f"{kind}: seed {number} is well", flush=True)
    return rounds


def main() -> None:
    """As the command line says."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kinds", nargs="+", choices=["folder", "objects", "s3", "mooncake"])
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    try:
        for kind in given.kinds:
            rounds = soak(kind, given.minutes, given.seed)
            print(f"{kind}: {rounds} rounds, {15 * rounds} killed savers, nothing wrong")
    finally:
        ranks.stop_server()


if __name__ == "__main__":
    main()
