"""What an order depends on, besides the database."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from sapwood.errors import ConfigError

__all__ = ["OrderSpec", "Scope", "Shuffle", "Tail"]

Shuffle = Literal["none", "window", "global", "reuse"]
Tail = Literal["pad", "drop", "keep"]
Scope = Literal["process", "node", "group"]


@dataclass(frozen=True, kw_only=True)
class OrderSpec:
    """All that makes one order of batches; none of it may change in the middle of an epoch.

    A stream is the canonical share of a batch that one process reads: with as many streams as
    ranks each rank reads its own, with fewer ranks each reads several. So ``streams`` belongs to
    the order, and the number of ranks does not.
    """

    batch: int
    """Records of a batch, over all ranks."""
    shuffle: Shuffle = "none"
    seed: int = 0
    tail: Tail = "pad"
    streams: int = 1
    window: int = 1
    """Records that each stream holds in memory, and shuffles."""
    factor: int = 1
    """How often a record that is in memory is used, with ``reuse``."""
    scope: Scope = "process"
    """Among which streams records are recombined, with ``reuse``."""
    cell: int = 1
    """How many streams are a node, for the scope ``node``."""

    def __post_init__(self) -> None:
        """Refuse what makes no order.

        Raises:
            ConfigError: a number is below 1, or a word is not known.
        """
        for name in ("batch", "streams", "window", "factor", "cell"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)}: expected 1 or more")
        for name, known in (
            ("shuffle", ("none", "window", "global", "reuse")),
            ("tail", ("pad", "drop", "keep")),
            ("scope", ("process", "node", "group")),
        ):
            if getattr(self, name) not in known:
                raise ConfigError(
                    f"{name}={getattr(self, name)!r}: expected one of {', '.join(known)}"
                )
        if self.factor > 1 and self.shuffle != "reuse":
            raise ConfigError(f"factor={self.factor} is for shuffle='reuse', not {self.shuffle!r}")

    @property
    def mixed(self) -> int:
        """How many streams are recombined with each other."""
        if self.shuffle != "reuse" or self.scope == "process":
            return 1
        return self.streams if self.scope == "group" else min(self.cell, self.streams)
