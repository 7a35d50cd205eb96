"""Tiers as a user writes them (``local:/scratch``, ``parity:4+2``), and nodes as tiers see them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from sapwood.errors import ConfigError
from sapwood.repository.names import check_name
from sapwood.repository.opening import is_folder

__all__ = ["SHARED", "NodeMap", "TierSpec"]

_KINDS = ("memory", "local", "partner", "parity", "external", "s3", "store")
_FOLDERS = ("local", "partner", "external")
_STORE = "store://"
SHARED = ("external", "s3", "store")
"""Tiers in which every node sees the shards of all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TierSpec:
    """One tier of a checkpointer."""

    kind: str
    place: str = ""
    """A folder (local, external, partner), a URL (s3), ``k+m`` or ``k+m:folder`` (parity), or a
    model repository (store).

    The folder of partner and parity is where a node keeps what others give it; without one, that
    is a folder beside the local tier's shards.
    """
    every: int = 1
    """Only every n-th checkpoint goes here."""
    incremental: bool = False
    """``local`` only: reference ranges that have not changed since the last checkpoint."""
    compress: bool = False
    """``local`` only: compress with zstd where it helps; weights being trained hardly shrink."""
    retries: int = 5
    """How often a failed shard is tried again, each time after a longer pause."""
    timeout: float = 10.0
    """Seconds another node may take for its next answer (partner, parity)."""
    name: str = ""
    """``store`` only: the model whose versions the checkpoints are; empty for the run's id."""
    series: str = ""
    """``store`` only: which checkpoints of the repository are this training's. Set for you: by
    the name, or by the place of the checkpointer."""
    forked: str = ""
    """``store`` only: ``run@step``, if the training is a fork. Set for you."""

    def __post_init__(self) -> None:
        """Refuse what no tier can be made of."""
        if self.kind not in _KINDS:
            raise ConfigError(f"tier {self.kind!r} is not known; there are {', '.join(_KINDS)}")
        if (self.incremental or self.compress) and self.kind != "local":
            raise ConfigError(f"tier {self.kind}: incremental and compress are for the local tier")
        self._check_store()
        if self.every < 1 or self.retries < 0:
            raise ConfigError(f"tier {self.kind}: every={self.every}, retries={self.retries}")
        if not 0 < self.timeout < math.inf:
            raise ConfigError(f"tier {self.kind}: timeout={self.timeout}, expected seconds")

    def _check_store(self) -> None:
        if self.kind != "store":
            if self.name or self.series or self.forked:
                raise ConfigError(f"tier {self.kind}: name, series and forked are for store")
            return
        if not self.place:
            raise ConfigError("tier store: no repository is named; write it as store://models/")
        if not is_folder(self.place):
            raise ConfigError(
                f"tier store: {self.place!r} cannot hold checkpoints yet; expected the folder of a "
                "repository, such as store://models/"
            )
        if self.name:
            check_name(self.name)

    @classmethod
    def parse(cls, text: str) -> TierSpec:
        """A tier from its short form, such as ``local:/scratch`` or ``parity:4+2``."""
        if text.startswith(_STORE):
            return _repository(text.removeprefix(_STORE))
        if text.startswith("s3://"):
            return cls(kind="s3", place=text)
        kind, _, place = text.partition(":")
        return cls(kind=kind, place=place)

    @property
    def folder(self) -> str:
        """The folder of a tier that has one; empty for any other."""
        if self.kind == "parity":
            return self.place.partition(":")[2]
        embedded = self.kind == "store" and is_folder(self.place)
        return self.place if embedded or self.kind in _FOLDERS else ""

    def resolved(self) -> TierSpec:
        """The same tier with an absolute folder.

        An engine has another current folder than the rank that started it, and a training may
        change its own.
        """
        if not self.folder:
            return self
        folder = str(Path(self.folder).resolve())
        scheme = f"{self.place.partition(':')[0]}:" if self.kind == "parity" else ""
        return replace(self, place=f"{scheme}{folder}")


def _repository(text: str) -> TierSpec:
    """The tier behind ``store://``: a place, and which training is meant, by name or place."""
    place, mark, query = text.partition("?")
    key, _, value = query.partition("=")
    if not mark:
        return TierSpec(kind="store", place=place)
    if key not in ("name", "place") or not value:
        raise ConfigError(
            f"tier {_STORE}{text}: expected ?name= and the name of a model, or ?place= and the "
            "place of a checkpointer"
        )
    if key == "name":
        return TierSpec(kind="store", place=place, name=value)
    series = value if "://" in value else str(Path(value).resolve())
    return TierSpec(kind="store", place=place, series=series)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeMap:
    """Which ranks are on which node, and where the nodes' engines listen."""

    node: str
    """This node's name."""
    rank_nodes: tuple[str, ...]
    """The node of each rank."""
    addresses: Mapping[str, str] = field(default_factory=dict)
    """``host:port`` of each node's engine, for what nodes keep for each other."""
    bind: str = ""
    """Where this node's engine listens if that is not the host of its address."""
    token: str = ""
    """What an engine must present to another; never written to a record or a log."""

    @property
    def nodes(self) -> tuple[str, ...]:
        """The nodes, in the order of their first rank."""
        return tuple(dict.fromkeys(self.rank_nodes))

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks of this node."""
        return tuple(r for r, node in enumerate(self.rank_nodes) if node == self.node)
