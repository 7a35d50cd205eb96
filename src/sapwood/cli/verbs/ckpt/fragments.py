"""Shards in fragments, as they lie in the folders of several nodes (``<node>/kept/parity``)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sapwood.errors import CheckpointError, SapwoodError, TierError
from sapwood.tiers.base import Stored
from sapwood.tiers.blobs import BlobFolder
from sapwood.tiers.fragments import AREA, Fragment
from sapwood.tiers.gathering import Gathering, enough
from sapwood.tiers.keeper import Blob
from sapwood.tiers.rebuilt import Held, ParityShard
from sapwood.tiers.record import CheckpointId, ShardRecord

__all__ = ["FragmentFolders", "Fragments", "holds_fragments", "node_folders"]

_KEPT = "kept"


@dataclass(frozen=True)
class Fragments:
    """What there is of a shard."""

    scheme: str
    there: int
    lost: tuple[int, ...]
    nbytes: int
    """On all nodes, with what is there for parity."""

    def __str__(self) -> str:
        """As tables show it."""
        return f"{self.there} of {self.scheme} fragments"


class FragmentFolders:
    """The fragments in folders that can all be reached from here. Fulfils ``Tier``, to read."""

    name = AREA

    def __init__(self, folders: Mapping[str, Path]) -> None:
        """``folders`` are what nodes keep, by node."""
        self._folders = {node: BlobFolder(path) for node, path in folders.items()}
        self._gathering = Gathering(self._folders)

    def put(self, record: ShardRecord, data: Any) -> None:
        """Refused: a run knows its nodes, a folder does not."""
        raise TierError("fragments are written by a run, or anew from others of the same shard")

    def shards(self) -> Sequence[Stored]:
        """Also those with too few fragments, which cannot be opened: the user must see them."""
        found = (held[0].fragment for held in self._gathering.groups())
        return sorted({Stored(one.id, one.rank) for one in found})

    def open(self, stored: Stored) -> ParityShard:
        """Rebuild a shard from its fragments."""
        return self._gathering.open(stored)

    def fragments(self, stored: Stored) -> Fragments:
        """How many of a shard there are, and which are lost."""
        held = self._best(stored)
        scheme, there = held[0].fragment.scheme, {one.fragment.index for one in held}
        lost = tuple(sorted(set(range(scheme.total)) - there))
        return Fragments(str(scheme), len(there), lost, sum(_size(one) for one in held))

    def verify_files(self, id: CheckpointId) -> None:
        """Read every fragment.

        Raises:
            CheckpointError: one is lost or damaged, though its shard may still be read.
        """
        problems = [p for held in self._gathering.groups(id) for p in self._problems(held)]
        if problems:
            raise CheckpointError("; ".join(problems))

    def remake(self, id: CheckpointId) -> None:
        """Write lost and damaged fragments anew, wherever k others are sound.

        Raises:
            CheckpointError: there is no node for one that was lost.
            TierError: it could not be written.
        """
        homeless = []
        for held in self._gathering.groups(id):
            if not enough(held):
                continue
            targets, left = self._targets(id, held)
            if targets:
                self._gathering.remake(held, targets)
            if left:
                first = held[0].fragment
                homeless.append(f"fragments {left} of shard {first.rank} of {id}")
        if homeless:
            raise CheckpointError(
                f"{'; '.join(homeless)} have no node to go to: every node here has one of that "
                "shard already; make the folder of the node that was lost, and repair again"
            )

    def drop(self, id: CheckpointId) -> None:
        """Remove a checkpoint from all nodes."""
        for folder in self._folders.values():
            folder.drop(AREA, id.folder)

    def close(self) -> None:
        """Nothing runs."""

    def _best(self, stored: Stored) -> list[Held]:
        groups = self._gathering.groups(stored.id)
        mine = [held for held in groups if held[0].fragment.rank == stored.rank]
        return max(mine, key=len)

    def _problems(self, held: Sequence[Held]) -> Iterator[str]:
        first = held[0].fragment
        what = f"shard {first.rank}"
        lost = sorted(set(range(first.scheme.total)) - {one.fragment.index for one in held})
        if lost:
            yield f"{what}: fragments {lost} of {first.scheme} are lost"
        for one, why in self._damaged(held).items():
            yield f"{what}: {one} is damaged: {why}"

    def _damaged(self, held: Sequence[Held]) -> dict[Held, str]:
        try:
            return self._gathering.rebuilt(held).check_all()
        except SapwoodError as error:  # too few of them have a record that can be read
            return {held[0]: str(error)}

    def _targets(
        self, id: CheckpointId, held: Sequence[Held]
    ) -> tuple[dict[int, str], tuple[int, ...]]:
        """Where to write which fragment, and those for which there is no node."""
        total = held[0].fragment.scheme.total
        targets = {one.fragment.index: one.node for one in self._damaged(held)}
        lost = sorted(set(range(total)) - {one.fragment.index for one in held})
        free = [node for node in self._folders if node not in {one.node for one in held}]
        # Those with the least first, so that what was spread evenly stays so.
        free.sort(key=lambda node: len(self._folders[node].names(AREA, id.folder)))
        targets |= dict(zip(lost, free, strict=False))
        return targets, tuple(lost[len(free) :])


def holds_fragments(home: Path) -> bool:
    """Whether the checkpoints in a folder are fragments."""
    paths = home.glob("*/*.json") if home.name == AREA else ()
    return any(Fragment.parse(Blob(AREA, p.parent.name, p.stem)) is not None for p in paths)


def node_folders(homes: Sequence[Path], within: Path) -> dict[str, Path]:
    """What nodes keep, by node: those whose fragments are in ``homes``, and nodes beside them.

    A node that came back empty has a folder that is empty, or has other tiers' shards.
    """
    folders = {_node(home.parent): home.parent for home in homes}
    roots = {home.parent.parent.parent for home in homes if home.parent.name == _KEPT}
    for root in sorted(root for root in roots if within in (root, *root.parents)):
        for child in sorted(root.iterdir()):
            if child.is_dir() and _node(child / _KEPT) not in folders and _is_node(child):
                folders[_node(child / _KEPT)] = child / _KEPT
    return folders


def _node(kept: Path) -> str:
    return str(kept.parent) if kept.name == _KEPT else str(kept)


def _is_node(folder: Path) -> bool:
    names = [entry.name for entry in folder.iterdir()]
    if folder.name.startswith(".") or CheckpointId.parse(folder.name.partition(".")[0]):
        return False
    return not names or _KEPT in names or any(map(CheckpointId.parse, names))


def _size(held: Held) -> int:
    with suppress(CheckpointError):  # its data file is gone
        return held.keeper.size(held.fragment.blob)
    return 0
