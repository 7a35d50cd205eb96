from __future__ import annotations

from sapwood.transport.gloo import open_gloo
from tests.transport.suite import Suite


class TestGloo(Suite):
    opener = staticmethod(open_gloo)
