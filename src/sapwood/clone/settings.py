"""What can be set about clones."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from sapwood.errors import ConfigError

__all__ = ["CloneSettings"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CloneSettings:
    """How a running job lets itself be cloned."""

    approach: Literal["deepclone", "lazy", "p2p", "file"] = "deepclone"
    """``deepclone``: sent while back-propagation runs. ``lazy``: in the background, after the step.
    ``p2p``: whole, rank to rank, after the step, blocking. ``file``: through a file."""
    transport: Literal["auto", "gloo", "memory", "mpi", "mooncake", "nccl"] = "auto"
    """How bytes travel; a clone may ask for another."""
    patience: float = 2.0
    """Seconds an update may wait for a clone, in all; then ``late`` decides."""
    late: Literal["copy", "drop"] = "copy"
    """``copy``: set aside what is not sent yet and go on. ``drop``: give the clone up."""
    join_timeout: float = 60.0
    """Seconds a clone has to get ready after it was let in."""
    send_timeout: float = 60.0
    """Seconds a message may take; updates do not wait for it that long."""
    step_timeout: float = 600.0
    """Seconds a clone waits for the donors' step, and for what they send."""
    host: str = ""
    """The address, name or interface of rank 0's machine under which clones reach it; found by
    itself if empty."""

    def __post_init__(self) -> None:
        """Refuse values that cannot work."""
        for name in ("patience", "join_timeout", "send_timeout", "step_timeout"):
            value = getattr(self, name)
            if not 0 < value < math.inf:
                raise ConfigError(f"{name} is {value}, expected seconds")
