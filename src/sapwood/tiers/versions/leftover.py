"""Shards that wait: made a version when all are there, removed when nobody will bring the rest."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

from sapwood.errors import ModelNotFound, SapwoodError
from sapwood.repository.base import Backend
from sapwood.storage import Durability
from sapwood.tiers.record import CheckpointId
from sapwood.tiers.versions.facts import Origin, StagedFacts, homes_in
from sapwood.tiers.versions.family import find_saved
from sapwood.tiers.versions.index import Version
from sapwood.tiers.versions.parts import CheckpointParts
from sapwood.tiers.versions.publishing import publish
from sapwood.tiers.versions.shard import StagedShard
from sapwood.tiers.versions.staging import open_staged, remove_staged, staged_in

__all__ = ["clear", "finish", "tidy"]

log = logging.getLogger(__name__)


def finish(
    backend: Backend,
    origin: Origin,
    id: CheckpointId,
    durability: Durability,
    known: Version | None = None,
) -> bool:
    """Make the version of a checkpoint, if the shards of all ranks wait; whether it is there.

    Raises:
        CheckpointError: the shards do not belong together, or are damaged.
        StoreError, StorageError: it cannot be done now.
    """
    waiting = staged_in(backend, origin.series, id).get((origin.series, id), [])
    if not waiting:
        return False
    try:
        first = open_staged(backend, origin.series, id, waiting[0].rank)
        if len(waiting) < first.record.world:
            return False
        shards = _all(backend, origin, id, first)
        publish(backend, origin, CheckpointParts.of_staged(shards), known, durability)
    except SapwoodError:
        # Whoever was faster has removed what waited.
        if not staged_in(backend, origin.series, id) and _is_there(backend, origin, id):
            return True
        raise
    remove_staged(backend, origin.series, id)
    return True


def _all(
    backend: Backend, origin: Origin, id: CheckpointId, first: StagedShard
) -> dict[int, StagedShard]:
    found = {first.record.rank: first}
    for rank in range(first.record.world):
        if rank not in found:
            found[rank] = open_staged(backend, origin.series, id, rank)
    return found


def _is_there(backend: Backend, origin: Origin, id: CheckpointId) -> bool:
    return find_saved(backend, origin, id, "*") is not None


def clear(
    backend: Backend,
    durability: Durability,
    *,
    series: str = "",
    covers: Callable[[CheckpointId], bool] = lambda _: True,
    quiet: float = 0.0,
) -> list[CheckpointId]:
    """Finish what is complete of what waits, and remove the rest once it is old; which ones.

    Args:
        backend: of the repository.
        durability: of versions that are made.
        series: of one training only.
        covers: which checkpoints are to be judged.
        quiet: seconds since their last shard came, or part of a version was saved.
    """
    cleared = []
    for (_, id), shards in staged_in(backend, series).items():
        origin = shards[0].origin
        if not covers(id) or not _is_quiet(backend, shards, quiet):
            continue
        if not _finished(backend, origin, id, durability):
            remove_staged(backend, origin.series, id)
            cleared.append(id)
    _clear_parts(backend, series, quiet)
    return cleared


def tidy(backend: Backend, durability: Durability, *, quiet: float) -> list[CheckpointId]:
    """The same for a whole repository, before its garbage is collected."""
    return clear(backend, durability, quiet=quiet)


def _is_quiet(backend: Backend, shards: Sequence[StagedFacts], quiet: float) -> bool:
    home = shards[0].reference.name
    newest = max((record.created for record in backend.models(home)), default=0.0)
    return time.time() - newest >= quiet


def _finished(backend: Backend, origin: Origin, id: CheckpointId, durability: Durability) -> bool:
    try:
        return finish(backend, origin, id, durability)
    except SapwoodError as error:
        log.warning("checkpoint %s is given up: %s", id, error)
        return False


def _clear_parts(backend: Backend, series: str, quiet: float) -> None:
    """Parts of versions whose shards are gone: their writer died when all was done."""
    there = {shards[0].reference.name for shards in staged_in(backend, series).values()}
    for record in backend.models(homes_in(series)):
        if record.name not in there and time.time() - record.created >= quiet:
            try:
                backend.remove(record.reference)
            except ModelNotFound:  # its writer lives, and has just done it
                log.debug("%s is gone already", record.reference)
