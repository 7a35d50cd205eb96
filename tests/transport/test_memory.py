from __future__ import annotations

from sapwood.transport.memory import open_memory
from tests.transport.openers import open_slots
from tests.transport.suite import Suite


class TestMemory(Suite):
    opener = staticmethod(open_memory)


class TestSlots(Suite):
    """Where no process may read another's memory."""

    opener = staticmethod(open_slots)
