"""``sapwood ckpt repair``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from cyclopts import Parameter

from sapwood.cli.verbs.ckpt.diagnosis import Diagnosis, bytes_of, diagnose
from sapwood.cli.verbs.ckpt.places import DEFAULT_PLACE, Place, find_tiers
from sapwood.cli.verbs.ckpt.remedies import Remedies, Step
from sapwood.cli.verbs.ckpt.survey import survey
from sapwood.cli.words import progress
from sapwood.errors import SapwoodError
from sapwood.runtime.durations import parse_seconds

__all__ = ["repair"]

_Flag = Annotated[bool, Parameter(negative="")]


def repair(
    place: str = DEFAULT_PLACE,
    /,
    *,
    source: Annotated[tuple[str, ...], Parameter(name="--from")] = (),
    older: str = "1h",
    incomplete: _Flag = False,
    yes: _Flag = False,
) -> int:
    """Mend a place: finish what can be finished, copy lost shards back, clear leftovers away.

    Every byte is read first. Shards that are missing or damaged are copied from another copy in the
    place, or with `--from` from other places, verified, and read back. Checkpoints whose shards are
    all there but that were never published are published. Fragments that nodes of a parity group
    have lost, or that are damaged, are made anew from the others, if the folders of the nodes are
    all below the place. Drafts of dead attempts and what is left of removed checkpoints goes once
    nothing in it has changed for an hour. Without `--yes` it only says what it would do.

    What is beyond repair is said, and the exit code is then 1; so it is if something could not be
    done.

    ```
    sapwood ckpt repair                              say what would be done to ckpts/
    sapwood ckpt repair /data/ckpts --yes            do it
    sapwood ckpt repair ckpts --from /scratch --yes  copy lost shards from the nodes' folders
    sapwood ckpt repair --older 1d --incomplete      also name old ones that can never be whole
    ```

    Args:
        place: A folder, s3:// URL or store://models/.
        source: Other places that may have what is lost here; may be given several times.
        older: How long a leftover must have been untouched: 90s, 15m, 1h, 2d.
        incomplete: Also remove checkpoints that are beyond repair, if a newer one is sound. Give
            the folder of all nodes, not of one: shards on other nodes count.
        yes: Do it.
    """
    limit = parse_seconds(older, "--older")
    here, there = find_tiers(place), [one for text in source for one in find_tiers(text)]
    ours, theirs = _read(here), _read(there)
    remedies = Remedies(here, ours, theirs, limit, incomplete=incomplete)
    steps = list(remedies.steps())
    failed = 0
    for step in steps:
        print(f"{'' if yes else 'would '}{step.sentence}")
        if yes:
            failed += not _done(step)
    for sentence in remedies.unfinished:
        print(f"left alone: {sentence}")
    for sentence in remedies.hopeless:
        print(f"beyond repair: {sentence}")
    if remedies.hopeless and not source:
        print("if another place may have what is lost, name it with --from")
    if not steps:
        print(f"nothing to do in {place}" if not remedies.hopeless else "nothing can be done")
    elif not yes:
        print("nothing was changed; add --yes to do it")
    return int(failed > 0 or bool(remedies.hopeless))


def _read(places: Sequence[Place]) -> list[Diagnosis]:
    """Every checkpoint of these places, and which copies of its shards are sound."""
    found = survey(places) if places else []
    with progress("reading", bytes_of(found)) as advance:
        return [diagnose(one, advance) for one in found]


def _done(step: Step) -> bool:
    try:
        step.do()
    except (SapwoodError, OSError) as error:
        print(f"  failed: {error}")
        return False
    return True
