"""What is in a place: every checkpoint, who has which shard of it, and what is wrong with it."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from sapwood.checkpoint.branches import Branches, Seen
from sapwood.cli.verbs.ckpt.fragments import FragmentFolders, Fragments
from sapwood.cli.verbs.ckpt.places import DEFAULT_PLACE, Place, checkpoint_of, find_places
from sapwood.errors import CheckpointError, SapwoodError, TierError
from sapwood.tiers.base import Stored, open_checked
from sapwood.tiers.metrics import metrics_of
from sapwood.tiers.record import CheckpointId, Lineage, ShardRecord, differing
from sapwood.tiers.versions.facts import named

__all__ = [
    "ABANDONED",
    "CURRENT",
    "OTHER",
    "Checkpoint",
    "Copy",
    "Leftover",
    "find",
    "find_one",
    "split",
    "survey",
]

_OURS = re.compile(
    r"shard-\d+(\.base-\d+)?\.(bin|json|index|extras)|.+\.safetensors|manifest\.json"
    r"|\..+\.draft-.+"
)
"""What tiers put into the folder of a checkpoint; anything else is somebody's, and stays."""
CURRENT, ABANDONED, OTHER = "current", "abandoned", "other training"


@dataclass(frozen=True)
class Copy:
    """One shard in one place."""

    place: Place
    rank: int
    record: ShardRecord | None
    problem: str | None = None
    """Why there is no record: it, or its data file, cannot be read."""
    fragments: Fragments | None = None
    """If it is in fragments: how many there are."""


@dataclass(frozen=True)
class Leftover:
    """A folder or file of a checkpoint that no tier counts as a shard: a draft, or half removed."""

    place: Place
    path: Path
    age: float
    """Seconds since anything in it changed."""


@dataclass
class Checkpoint:
    """All that is known of one checkpoint."""

    id: CheckpointId
    copies: list[Copy] = field(default_factory=list)
    leftovers: list[Leftover] = field(default_factory=list)
    branch: str = ""
    """Of the current branch, an abandoned one, or another training; empty if no record says."""

    @cached_property
    def records(self) -> Mapping[int, ShardRecord]:
        """A readable record of each shard, whichever place it is from."""
        return {c.rank: c.record for c in reversed(self.copies) if c.record is not None}

    @cached_property
    def any_record(self) -> ShardRecord | None:
        """The record of the lowest rank there is; None if none can be read."""
        return self.records[min(self.records)] if self.records else None

    @property
    def missing(self) -> list[int]:
        """Shards that are nowhere, or whose record is damaged everywhere."""
        record = self.any_record
        return [] if record is None else [r for r in range(record.world) if r not in self.records]

    @property
    def damaged(self) -> list[Copy]:
        """Copies that cannot be opened."""
        return [c for c in self.copies if c.problem is not None]

    @property
    def drafts(self) -> list[Leftover]:
        """Where its shards are still in a draft, which other tools do not take for a checkpoint."""
        name = self.id.folder
        return [
            left
            for left in self.leftovers
            if left.path.name == f"{name}.partial" and not left.path.with_name(name).exists()
        ]

    @property
    def whole(self) -> bool:
        """Whether every shard is in some place; their bytes were not read."""
        return self.any_record is not None and not self.missing

    @property
    def state(self) -> str:
        """In a word or two, for a table."""
        if not self.copies:
            return "partial"
        bad = sorted({c.rank for c in self.damaged})
        if self.whole:
            notes = [f"a copy of {_shards(bad)} damaged"] if bad else []
            short = sorted({c.rank for c in self.copies if c.fragments and c.fragments.lost})
            notes += [f"fragments of {_shards(short)} lost"] if short and not bad else []
            return ", ".join(["whole", *notes, *(["not published"] if self.drafts else [])])
        lost = sorted(set(self.missing) - set(bad))
        words = [f"{_shards(bad)} damaged"] if bad else []
        return ", ".join(words + ([f"{_shards(lost)} missing"] if lost else []))

    @property
    def lineage(self) -> Lineage | None:
        """Where the attempt that saved it came from; None if no record says."""
        return self.any_record.lineage if self.any_record else None

    @property
    def fork(self) -> str:
        """The fork whose checkpoint it is; empty if it is no fork's."""
        return min(place.fork for place in self.places) if self.places else ""

    @property
    def training(self) -> str:
        """Of several in one repository, the one it is of; empty if it lies elsewhere, too."""
        found = {place.training for place in self.places}
        return found.pop() if len(found) == 1 else ""

    @property
    def created(self) -> float:
        """Seconds since the epoch; 0 if no record can be read."""
        return self.any_record.created if self.any_record else 0.0

    @property
    def age(self) -> float | None:
        """Seconds since it was captured, or since its draft last changed."""
        if self.any_record is not None:
            return time.time() - self.created
        return min((left.age for left in self.leftovers), default=None)

    @property
    def nbytes(self) -> int | None:
        """Bytes of its tensors."""
        return self.any_record.catalog.nbytes if self.any_record else None

    @property
    def metrics(self) -> dict[str, float]:
        """What was saved for ``retention.best``."""
        return metrics_of(self.any_record.extras) if self.any_record else {}

    @property
    def places(self) -> list[Place]:
        """Where something of it is."""
        every = [c.place for c in self.copies] + [left.place for left in self.leftovers]
        return list({place.label: place for place in every}.values())

    def readable(self) -> ShardRecord:
        """The lowest rank's record.

        Raises:
            CheckpointError: it is not whole, or its shards are not of one checkpoint.
        """
        record = self.any_record
        if record is None or self.missing:
            why = "; ".join(c.problem for c in self.damaged if c.problem)
            raise CheckpointError(
                f"checkpoint {self.id} is not whole: {self.state}" + (f" ({why})" if why else "")
            )
        for rank, other in self.records.items():
            if other.identity != record.identity:
                raise CheckpointError(
                    f"shards {record.rank} and {rank} of checkpoint {self.id} do not belong "
                    f"together, they differ in {differing(record.identity, other.identity)}: files "
                    "were moved, or come from another training"
                )
        return record


def survey(places: Sequence[Place]) -> list[Checkpoint]:
    """Every checkpoint of these places, oldest step first.

    Of a step, that of the current branch comes last, else that of the newest attempt.

    Raises:
        TierError: a place cannot be listed.
    """
    found: dict[CheckpointId, Checkpoint] = {}
    for place in places:
        for stored in place.tier.shards():
            checkpoint = found.setdefault(stored.id, Checkpoint(stored.id))
            checkpoint.copies.append(_copy(place, stored))
    for left in _leftovers(places, list(found.values())):
        id = checkpoint_of(left.path.name) or checkpoint_of(left.path.parent.name)
        assert id is not None
        found.setdefault(id, Checkpoint(id)).leftovers.append(left)
    _mark_branches(found.values())
    return sorted(
        found.values(),
        key=lambda c: (c.id.step, c.branch == CURRENT, c.created, c.id.attempt),
    )


def _mark_branches(found: Iterable[Checkpoint]) -> None:
    """Say of each checkpoint what a restore would take it for.

    Forks have folders of their own, and in a repository each training is by itself.
    """
    homes: dict[tuple[str, str], list[Checkpoint]] = {}
    for one in found:
        homes.setdefault((one.fork, one.training), []).append(one)
    for mine in homes.values():
        readable = [one for one in mine if one.any_record is not None]
        branches = Branches(Seen(c.id, c.created, c.lineage) for c in readable)
        current = branches.current()
        for one in mine:
            if one.id.attempt not in branches.attempts:
                continue
            related = current.is_related(branches.lineage(one.id.attempt))
            one.branch = CURRENT if one.id in current else ABANDONED if related else OTHER


def split(argument: str, place: str) -> tuple[str, str]:
    """Place and name of a checkpoint given as ``15``, ``latest``, or ``some/place/latest``."""
    before, slash, name = argument.rstrip("/").rpartition("/")
    return (before or "/", name) if slash else (place, name)


def find_one(argument: str, place: str = DEFAULT_PLACE) -> Checkpoint:
    """The checkpoint a user means.

    Raises:
        CheckpointError: there is none; the message lists those there are.
    """
    where, name = split(argument, place)
    return find(name, survey(find_places([where])), where)


def find(name: str, among: Sequence[Checkpoint], where: str) -> Checkpoint:
    """The checkpoint of this name: a step, an id, or ``latest``.

    ``latest`` is what ``restore_latest`` takes: the newest of the current branch that is whole.
    """
    if name == "latest":
        _one_training(among, name, where)
        # Those of forks count only where there are no others: each fork has its own branch.
        ours = [c for c in among if not c.fork]
        fork = "" if ours or not among else max(among, key=lambda c: c.created).fork
        for checkpoint in reversed(among):
            if checkpoint.whole and checkpoint.branch == CURRENT and checkpoint.fork == fork:
                return checkpoint
        raise CheckpointError(
            f"no checkpoint in {where} is whole on the current branch; {_known(among)}"
        )
    fitting = [c for c in among if name in (c.id.folder, str(c.id.step))]
    if not fitting and name.isdigit():
        fitting = [c for c in among if c.id.step == int(name)]
    if not fitting:
        raise CheckpointError(f"no checkpoint {name!r} in {where}; {_known(among)}")
    _one_training(fitting, name, where)
    # An attempt that only began the step must not hide the one that finished it.
    return next((c for c in reversed(fitting) if c.whole), fitting[-1])


def _one_training(among: Sequence[Checkpoint], name: str, where: str) -> None:
    """See that no choice between trainings is made by chance."""
    known = sorted({one.training for one in among if not one.fork})
    if len(known) > 1:
        ways = " or ".join(f"{where}{_choosing(training)}" for training in known)
        raise CheckpointError(
            f"{name} may be of {len(known)} trainings in {where}: say which one by {ways}, or give "
            "the id of a checkpoint"
        )


def _choosing(training: str) -> str:
    return f"?name={named(training)}" if named(training) else f"?place={training}"


def _known(among: Iterable[Checkpoint]) -> str:
    rows = [f"{c.id.folder} ({c.state})" for c in among]
    if not rows:
        return "there is none at all"
    shown = rows[-20:]
    more = f"{len(rows) - len(shown)} older ones and " if len(rows) > len(shown) else ""
    return f"there are {more}" + ", ".join(shown)


def _copy(place: Place, stored: Stored) -> Copy:
    fragments = place.tier.fragments(stored) if isinstance(place.tier, FragmentFolders) else None
    try:
        with closing(open_checked(place.tier, stored)) as shard:
            return Copy(place, stored.rank, shard.record, fragments=fragments)
    except SapwoodError as error:
        return Copy(place, stored.rank, None, str(error), fragments)


def _leftovers(places: Sequence[Place], found: Iterable[Checkpoint]) -> list[Leftover]:
    """What is in the folders but no tier counts."""
    counted = {(c.place.folder, one.id.folder) for one in found for c in one.copies}
    left = []
    for folder, place in {p.folder: p for p in places if p.folder is not None}.items():
        try:
            for entry in sorted(folder.iterdir()):
                if checkpoint_of(entry.name) is None:
                    continue
                paths = _uncounted(entry, counted=(folder, entry.name) in counted)
                left += [Leftover(place, path, time.time() - _changed(path)) for path in paths]
        except OSError as error:
            raise TierError(f"cannot list {folder}: {error.strerror or error}") from error
    return left


def _uncounted(entry: Path, *, counted: bool) -> list[Path]:
    """Drafts in a checkpoint that counts, or all of one that does not, if nothing foreign is in."""
    try:
        inside = sorted(entry.iterdir())
    except (FileNotFoundError, NotADirectoryError):  # it was removed just now, or is no checkpoint
        return []
    if counted:
        return [path for path in inside if ".draft-" in path.name]
    return [entry] if all(_OURS.fullmatch(path.name) for path in inside) else []


def _changed(path: Path) -> float:
    """When something in it was last written."""
    newest = 0.0
    for one in (path, *path.rglob("*")):
        with suppress(FileNotFoundError):  # a running save renames its drafts
            newest = max(newest, one.stat().st_mtime)
    return newest


def _shards(ranks: Sequence[int]) -> str:
    return f"shard{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
