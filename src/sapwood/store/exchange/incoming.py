"""What was read from files, to be saved as a version."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Incoming"]


@dataclass(frozen=True, kw_only=True)
class Incoming:
    """A model from elsewhere: ``repo.save(one.value, name, note=one.note, files=one.files)``."""

    value: Any
    """Its tensors may be mapped from a file, at any address: they are for saving."""
    note: Mapping[str, Any]
    """Where it comes from, and what its files say beside tensors."""
    files: Mapping[str, memoryview] = field(default_factory=dict)
    """What lies beside the weights, by name."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Numbers that came with it."""
    said: tuple[str, ...] = ()
    """What a user should know: what was left out, and what will not come back as it was."""
