"""A provider of each kind."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from sapwood.repository.providers.base import Provider
from sapwood.repository.providers.local import open_provider

LOCAL = ("memory", "folder")


@pytest.fixture(params=LOCAL)
def provider(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Provider]:
    place = "memory:" if request.param == "memory" else tmp_path / "place"
    opened = open_provider(place)
    yield opened
    opened.close()
