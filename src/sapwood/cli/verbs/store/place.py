"""Which repository the command line means."""

from __future__ import annotations

import math
import os
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

if TYPE_CHECKING:
    from sapwood.repository.base import ModelRecord
    from sapwood.store import Repository

__all__ = ["At", "Json", "opened", "plain"]

DEFAULT = "models"
At = Annotated[str | None, Parameter(name="--at")]
Json = Annotated[bool, Parameter(negative="")]


def opened(at: str | None, *, create: bool = False) -> Repository:
    """The repository at a place, by default that of ``SAPWOOD_STORE``, or ``models``."""
    from sapwood.store import open as open_repository

    return open_repository(at or os.environ.get("SAPWOOD_STORE") or DEFAULT, create=create)


def plain(record: ModelRecord) -> dict[str, Any]:
    """A version as JSON."""
    return {
        "name": record.name,
        "version": record.version,
        "created": record.created,
        "bytes": record.nbytes,
        "tensors": record.tensors,
        "tags": list(record.tags),
        # JSON has no word for infinity.
        "metrics": {k: v if math.isfinite(v) else repr(v) for k, v in record.metrics.items()},
        "note": dict(record.note),
        "removed": record.removed is not None,
    }
