from __future__ import annotations

from sapwood.testing import transport
from sapwood.transport.memory import open_memory
from tests.transport.openers import open_slots
from tests.transport.suite import Suite


class Gathering(Suite):
    def test_several_tensors_are_one_message(self) -> None:
        transport.check_gathers(self.opener)


class TestMemory(Gathering):
    opener = staticmethod(open_memory)


class TestSlots(Gathering):
    """Where no process may read another's memory."""

    opener = staticmethod(open_slots)
