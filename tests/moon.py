"""One Mooncake cluster for all tests that need one; each has a prefix of its own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from sapwood.storage.mooncake.keeper import MooncakeKeeper
from sapwood.testing import mooncake


@pytest.fixture(scope="session")
def moon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[mooncake.Cluster]:
    why = mooncake.missing()
    if why is not None:
        pytest.skip(why)
    # A client that stays: each of its own would take a second to end.
    with (
        mooncake.serve(tmp_path_factory.mktemp("mooncake")) as cluster,
        MooncakeKeeper(cluster.place("stays")),
    ):
        yield cluster


@pytest.fixture
def moon_place(moon: mooncake.Cluster, tmp_path: Path) -> str:
    """A place of it that nobody else uses."""
    return moon.place(tmp_path.name)
