"""Which checkpoint this is, which attempt wrote it, and what that attempt was restored from.

An *attempt* is one stretch of training that was never set back: it begins when a checkpointer
starts, and anew after each restore. All records of an attempt carry the same ``Lineage``, so that
whoever finds some of its checkpoints knows the whole branch, also when retention has removed the
checkpoints in between.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["CheckpointId", "Lineage", "root_of"]

_FOLDER = re.compile(r"(\d{8,})-([0-9a-f]{6})")
UNKNOWN_ROOT = ""
"""The root of attempts whose beginning was not recorded: they are taken for one training."""


@dataclass(frozen=True, order=True)
class CheckpointId:
    """A step of one attempt: a run that was restored and comes to a step again never overwrites."""

    step: int
    attempt: str
    """Six hexadecimal digits, drawn when a checkpointer starts and after each restore."""

    @property
    def folder(self) -> str:
        """The name of its folder."""
        return f"{self.step:08d}-{self.attempt}"

    @classmethod
    def parse(cls, folder: str) -> CheckpointId | None:
        """The id behind a folder's name; None for any other name."""
        found = _FOLDER.fullmatch(folder)
        return cls(int(found[1]), found[2]) if found else None

    def __str__(self) -> str:
        """As the command line shows it."""
        return self.folder


@dataclass(frozen=True, kw_only=True)
class Lineage:
    """Where an attempt came from."""

    run: str
    """The id of the run that trained."""
    began: float
    """When the attempt began, in seconds since the epoch by rank 0's clock; larger than that of
    every attempt there was in the place, so that the order survives a clock that is set back."""
    root: str
    """The attempt that began from scratch; attempts with the same root are of one training.

    Empty if a checkpoint of an older version, which recorded none of this, was restored.
    """
    ancestry: tuple[CheckpointId, ...] = ()
    """The checkpoints that were restored on the way here, the first one first."""

    @property
    def parent(self) -> CheckpointId | None:
        """The checkpoint the attempt was restored from; None for a training from scratch."""
        return self.ancestry[-1] if self.ancestry else None

    def __contains__(self, id: CheckpointId) -> bool:
        """Whether the attempt descends from a checkpoint."""
        return any(id.attempt == one.attempt and id.step <= one.step for one in self.ancestry)

    def to_json(self) -> dict[str, Any]:
        """Plain values for a record or a message."""
        return {
            "run": self.run,
            "began": self.began,
            "root": self.root,
            "ancestry": [[id.step, id.attempt] for id in self.ancestry],
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Lineage:
        """The reverse of ``to_json``.

        Raises:
            KeyError, TypeError, ValueError: this is not what ``to_json`` writes.
        """
        return cls(
            run=str(value["run"]),
            began=float(value["began"]),
            root=str(value["root"]),
            ancestry=tuple(CheckpointId(int(s), str(a)) for s, a in value["ancestry"]),
        )


def root_of(lineage: Lineage | None) -> str:
    """The training an attempt belongs to; all of unknown lineage are taken for one."""
    return UNKNOWN_ROOT if lineage is None else lineage.root
