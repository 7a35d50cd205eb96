"""What donors tell clones before anything else: who sends what, of which run, in which versions."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

import torch

from sapwood._version import __version__
from sapwood.clone.plan import ClonePlan, Key, plan_direct, plan_messages, plan_whole
from sapwood.errors import CloneError
from sapwood.state.catalog import Catalog

__all__ = ["APPROACHES", "Manifest", "versions"]

APPROACHES = ("deepclone", "lazy", "p2p", "file")
"""How a state is sent, see ``settings``; all but ``deepclone`` are there to be compared with."""


def versions() -> dict[str, str]:
    """What must be the same on both sides: plans and numbers depend on it."""
    return {"sapwood": __version__, "torch": torch.__version__}


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """All a clone must know to receive."""

    run: str
    """The id of the run that is cloned."""
    session: str
    donors: int
    clones: int
    hosts: tuple[str, ...]
    """Of all ends, donors first: under which the others reach them."""
    machines: tuple[str, ...]
    """Of all ends."""
    devices: tuple[str, ...]
    """Where each end has the tensors that its link takes."""
    approach: str
    transport: str
    relay: bool
    """Whether clones pass on to each other what they get; else each gets everything itself."""
    algorithm: str
    """Of the checksums."""
    versions: dict[str, str]
    catalog: tuple[Any, ...]
    buckets: tuple[tuple[int, ...], ...]
    """Numbers of the catalog's entries, in the order in which they are updated."""
    optimizer: str
    """The class of the optimizer."""
    groups: tuple[tuple[int, ...], ...]
    """Numbers of the catalog's entries, by the optimizer's parameter groups."""
    schedulers: tuple[str, ...]
    """The classes of the schedulers that the run steps."""
    digest: str = ""
    """Of the plan that follows from all this."""

    def plan(self) -> ClonePlan:
        """Who sends what to whom.

        Raises:
            CloneError: it is not the plan the donors have.
        """
        catalog = Catalog.from_json(self.catalog)
        keys = [entry.key for entry in catalog.entries]
        buckets: list[list[Key]] = [[keys[n] for n in bucket] for bucket in self.buckets]
        make = plan_messages if self.relay else plan_direct
        if self.approach == "p2p":
            make = plan_whole
        plan = make(catalog, buckets, self.donors, self.clones)
        if self.digest and plan.digest != self.digest:
            raise CloneError(
                "donors and clones have made different plans from the same manifest; run the same "
                "version of sapwood on both sides"
            )
        return plan

    def encode(self) -> str:
        """As JSON."""
        return json.dumps(asdict(self), separators=(",", ":"))

    @classmethod
    def decode(cls, text: str | bytes) -> Manifest:
        """The reverse of ``encode``.

        Raises:
            CloneError: this is no manifest.
        """
        try:
            fields = json.loads(text)
            for name in ("hosts", "machines", "devices", "catalog", "schedulers"):
                fields[name] = tuple(fields[name])
            for name in ("buckets", "groups"):
                fields[name] = tuple(tuple(numbers) for numbers in fields[name])
            return cls(**fields)
        except (ValueError, TypeError, KeyError) as error:
            raise CloneError(f"the donors sent no manifest we understand: {error}") from error
