"""Marks that several test files use."""

from __future__ import annotations

import pytest

from sapwood.testing import machines

__all__ = ["needs_machines"]

needs_machines = pytest.mark.skipif(
    machines.missing() is not None,
    reason=f"network namespaces cannot be made here: {machines.missing()}",
)
