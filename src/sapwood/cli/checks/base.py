"""The result of one look at the machine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["Check", "State", "note", "ok", "problem"]

State = Literal["ok", "note", "problem"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One line of the doctor."""

    name: str
    state: State
    found: str
    remedy: str | None = None


def ok(name: str, found: str) -> Check:
    """All is well."""
    return Check(name=name, state="ok", found=found)


def note(name: str, found: str, remedy: str) -> Check:
    """It works, but something is worth knowing."""
    return Check(name=name, state="note", found=found, remedy=remedy)


def problem(name: str, found: str, remedy: str) -> Check:
    """Something will fail."""
    return Check(name=name, state="problem", found=found, remedy=remedy)
