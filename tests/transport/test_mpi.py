from __future__ import annotations

import importlib.util

import pytest

from sapwood.transport.mpi import open_mpi
from tests.transport.suite import Suite


@pytest.fixture(scope="module", autouse=True)
def library() -> None:
    # Not imported: that would start MPI in the process that runs the tests.
    if importlib.util.find_spec("mpi4py") is None:
        pytest.skip("mpi4py is not installed: sapwood[mpi]")


class TestMpi(Suite):
    opener = staticmethod(open_mpi)
    # MPICH ends a process whose peer dies while it reads that one's memory. Donors, which do not
    # read, are safe from their clones; a clone may die with its donor.
    test_a_killed_donor_is_told_soon = None  # type: ignore[assignment]
