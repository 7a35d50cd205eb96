"""A listener of each kind."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.channel.places import WAYS, Place


@pytest.fixture(params=WAYS)
def place(request: pytest.FixtureRequest) -> Iterator[Place]:
    made = Place(request.param)
    yield made
    made.listener.close()
