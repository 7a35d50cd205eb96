from __future__ import annotations

import pytest

from sapwood.transport.mooncake import open_mooncake
from tests.transport.suite import Suite


@pytest.fixture(scope="module", autouse=True)
def engine() -> None:
    pytest.importorskip(
        "mooncake.engine", reason="Mooncake's libraries are missing", exc_type=ImportError
    )


class TestMooncake(Suite):
    opener = staticmethod(open_mooncake)
