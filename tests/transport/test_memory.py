from __future__ import annotations

from sapwood.transport.memory import open_memory
from tests.transport.suite import Suite


class TestMemory(Suite):
    opener = staticmethod(open_memory)
