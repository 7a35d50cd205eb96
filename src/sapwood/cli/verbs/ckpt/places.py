"""What a place is: the tiers behind a folder or a URL."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

from sapwood.cli.verbs.ckpt.fragments import FragmentFolders, holds_fragments, node_folders
from sapwood.errors import CheckpointError
from sapwood.tiers.base import Tier
from sapwood.tiers.local import LocalTier
from sapwood.tiers.make import make_tiers
from sapwood.tiers.record import CheckpointId
from sapwood.tiers.spec import NodeMap, TierSpec
from sapwood.tiers.versions import VersionTier
from sapwood.tiers.versions.facts import Origin

__all__ = ["DEFAULT_PLACE", "Place", "checkpoint_of", "find_places", "find_tiers"]

DEFAULT_PLACE = "ckpts"
_DEPTH = 5  # from a run's folder: ckpts/nodes/<node>/kept/partner
_PARTNER = "partner"
_STORE = "store://"
_FORK = re.compile(r"(?:^|/)forks/([^/)]+)")
_HERE = NodeMap(node="cli", rank_nodes=("cli",))


@dataclass(frozen=True)
class Place:
    """One tier, and where it is."""

    tier: Tier
    path: str
    """As it is shown: below the place the user gave."""
    folder: Path | None = None
    """None for a tier that is not a folder."""
    training: str = ""
    """Which one, where a place is shared by several."""

    @property
    def fork(self) -> str:
        """The id of the fork whose checkpoints are here; empty if they are no fork's."""
        found = _FORK.search(self.path)
        return "" if found is None else found[1]

    @property
    def label(self) -> str:
        """Kind and path."""
        return f"{self.tier.name} {self.path}"


def find_places(places: Iterable[str]) -> list[Place]:
    """The tiers of several places, each once."""
    found = {place.label: place for text in places for place in find_tiers(text)}
    return list(found.values())


def find_tiers(place: str) -> list[Place]:
    """The tiers behind a place: of a folder with nodes below it, those of all nodes.

    Raises:
        CheckpointError: there is no such place, or no checkpoint in it.
    """
    if place.startswith("s3://"):
        (tier,) = make_tiers([TierSpec.parse(place)], _HERE)
        if not tier.shards():
            raise CheckpointError(f"no checkpoints in {place}")
        return [Place(tier, place)]
    if place.startswith(_STORE):
        return _trainings(place)
    folder = Path(place)
    if not folder.is_dir():
        raise CheckpointError(
            f"there is no folder {folder} here; give the place the checkpoints are in: the folder "
            "of the checkpointer, the local folder of a node, s3://bucket/prefix, or "
            "store://models/"
        )
    homes = list(_homes(folder, _DEPTH))
    coded = [home for home in homes if holds_fragments(home)]
    found = [_place(home) for home in homes if home not in coded]
    if coded:
        found.append(Place(FragmentFolders(node_folders(coded, folder)), str(folder)))
    if not found:
        raise CheckpointError(
            f"no checkpoints in {folder}: neither it nor the folders below it hold any "
            "(a checkpoint is a folder such as 00000015-3f9a1c)"
        )
    return found


def _trainings(place: str) -> list[Place]:
    """The trainings whose checkpoints are versions of a repository, each a place of its own."""
    spec = TierSpec.parse(place).resolved()
    with closing(VersionTier(spec.place, Origin(series="", name=spec.name))) as every:
        known = [one for one in every.trainings() if spec.series in ("", one.series)]
    if not known:
        raise CheckpointError(f"no checkpoints in {place}")
    return [_training(spec, origin) for origin in known]


def _training(spec: TierSpec, origin: Origin) -> Place:
    # What a series is called says where the training's other checkpoints are, and which fork it is.
    path = f"{_STORE}{spec.place} ({origin.series})"
    named = replace(spec, name=origin.name, series=origin.series)
    (tier,) = make_tiers([named], _HERE)
    return Place(tier, path, training=origin.series)


def checkpoint_of(name: str) -> CheckpointId | None:
    """The checkpoint a folder belongs to, be it whole, a draft (``<id>.partial``) or on its way."""
    return CheckpointId.parse(name.partition(".")[0])


def _homes(folder: Path, depth: int) -> Iterator[Path]:
    """Folders that hold checkpoints, from the top."""
    try:
        children = sorted(entry.name for entry in os.scandir(folder) if entry.is_dir())
    except OSError as error:
        raise CheckpointError(f"cannot list {folder}: {error.strerror or error}") from error
    inside = {name for name in children if checkpoint_of(name) is not None}
    if inside:
        yield folder
    if depth:
        for name in children:
            if name not in inside and not name.startswith("."):
                yield from _homes(folder / name, depth - 1)


def _place(home: Path) -> Place:
    """A node's shards lie as captured (``shard-0.bin``); elsewhere they are put together."""
    inside = [entry for entry in home.iterdir() if checkpoint_of(entry.name) is not None]
    together = any(any(entry.glob("*.safetensors")) for entry in inside)
    if not together and any(any(entry.glob("shard-*.bin")) for entry in inside):
        name = _PARTNER if home.name == _PARTNER else "local"
        return Place(LocalTier(home, name=name), str(home), home)
    (tier,) = make_tiers([TierSpec(kind="external", place=str(home))], _HERE)
    return Place(tier, str(home), home)
