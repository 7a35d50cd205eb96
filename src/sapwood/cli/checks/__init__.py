"""What ``sapwood doctor`` looks at: small functions that each return one `Check`."""

from __future__ import annotations

from sapwood.cli.checks.base import Check, State
from sapwood.cli.checks.machine import MACHINE
from sapwood.cli.checks.software import SOFTWARE

__all__ = ["ALL", "Check", "State"]

ALL = (*SOFTWARE, *MACHINE)
