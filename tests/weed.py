"""One S3 server for all tests that need one; each has a prefix of its own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from sapwood.testing import seaweed

BUCKET = "ckpts"


@pytest.fixture(scope="session")
def weed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[seaweed.Server]:
    with seaweed.serve(tmp_path_factory.mktemp("seaweed")) as server:
        server.make_bucket(BUCKET)
        yield server


@pytest.fixture
def place(weed: seaweed.Server, tmp_path: Path) -> str:
    """An S3 place nobody else uses."""
    return f"s3://{BUCKET}/{tmp_path.name}"
