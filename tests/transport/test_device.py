from __future__ import annotations

from tests.transport.openers import open_ordered, open_staged
from tests.transport.suite import Suite


class TestStaged(Suite):
    opener = staticmethod(open_staged)


class TestOrdered(Suite):
    """The order that NCCL needs, on a group that can run anywhere."""

    opener = staticmethod(open_ordered)
    # gloo may lose a message whose connection breaks while it is begun; NCCL is aborted instead.
    test_a_killed_peer_is_told_soon = None  # type: ignore[assignment]
    test_a_killed_donor_is_told_soon = None  # type: ignore[assignment]
