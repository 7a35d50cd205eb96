"""``sapwood ckpt ls``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Annotated, Any

from cyclopts import Parameter

from sapwood.cli.verbs.ckpt.places import DEFAULT_PLACE, find_places
from sapwood.cli.verbs.ckpt.survey import ABANDONED, CURRENT, Checkpoint, survey
from sapwood.cli.words import age, size
from sapwood.tiers.metrics import plain_metrics

__all__ = ["ls"]


def ls(
    *places: str,
    json: Annotated[bool, Parameter(negative="")] = False,
) -> None:
    """List checkpoints, newest last: how old, how large, where they are, and whether whole.

    A checkpoint is *whole* (every shard is in one of the places; `verify` also reads the bytes),
    has *shards missing*, a *damaged* record, or is *partial*: a draft that was never finished, or
    what is left of one that was being removed; `repair` clears those away.

    A training that was restored goes on as a new *attempt*. If it went back to an older step, the
    checkpoints after that step are of an *abandoned* branch: `restore_latest` does not take them.
    *other training*: it was begun from scratch in the same place.

    ```
    sapwood ckpt ls                          the checkpoints under ckpts/
    sapwood ckpt ls /data/ckpts /scratch     two places together, as a restore sees them
    sapwood ckpt ls s3://bucket/run7
    sapwood ckpt ls store://models/          those that are versions in a model repository
    sapwood ckpt ls --json                   the same for a program
    ```

    Args:
        places: Folders, s3:// URLs or store://models/; ckpts if none is given.
        json: Write JSON instead of a table.
    """
    from sapwood.cli.output import print_json

    found = survey(find_places(places or (DEFAULT_PLACE,)))
    if json:
        print_json([_plain(checkpoint) for checkpoint in found])
    else:
        _show(found)


def _show(found: list[Checkpoint]) -> None:
    from rich.text import Text

    from sapwood.cli.output import console, table

    several = len({checkpoint.id.attempt for checkpoint in found}) > 1
    numbers = ("step", "age", "size", "world")
    branch = ("branch",) if several else ()
    made = table(
        "step",
        "attempt",
        *branch,
        "age",
        "size",
        "world",
        "state",
        "where",
        "metrics",
        right=numbers,
    )
    for checkpoint in found:
        record = checkpoint.any_record
        made.add_row(
            str(checkpoint.id.step),
            checkpoint.id.attempt,
            *([_branch(checkpoint)] if several else []),
            age(checkpoint.age),
            size(checkpoint.nbytes),
            "-" if record is None else str(record.world),
            Text(checkpoint.state, style="green" if checkpoint.state == "whole" else "yellow"),
            Text(_where(checkpoint)),
            Text(" ".join(f"{k}={v:g}" for k, v in checkpoint.metrics.items())),
        )
    console().print(made)
    for line in branch_lines(found) if several else ():
        console().print(Text(line))
    for checkpoint in found:
        for copy in checkpoint.damaged:
            console().print(Text(f"{checkpoint.id}, shard {copy.rank}: {copy.problem}"))


def _branch(checkpoint: Checkpoint) -> str:
    fork = f"fork {checkpoint.fork}" if checkpoint.fork else ""
    branch = checkpoint.branch or "?"
    return branch if not fork else fork if branch == CURRENT else f"{fork}, {branch}"


def branch_lines(found: Sequence[Checkpoint]) -> list[str]:
    """A line for each attempt, in the order in which they began: where it came from."""
    attempts: dict[str, list[Checkpoint]] = {}
    for one in sorted(found, key=_began):
        attempts.setdefault(one.id.attempt, []).append(one)
    return [f"attempt {name}: {_history(mine)}" for name, mine in attempts.items()]


def _began(checkpoint: Checkpoint) -> tuple[float, int]:
    lineage = checkpoint.lineage
    return checkpoint.created if lineage is None else lineage.began, checkpoint.id.step


def _history(mine: Sequence[Checkpoint]) -> str:
    lineage = next((one.lineage for one in mine if one.lineage is not None), None)
    if lineage is None:
        return "where it came from was not recorded, or cannot be read"
    parent = "from scratch" if lineage.parent is None else f"restored from {lineage.parent}"
    kept = [one.id.step for one in mine if one.branch == CURRENT]
    left = [one.id.step for one in mine if one.branch == ABANDONED]
    if kept and left:
        parent += f"; left after step {max(kept)}, what follows is abandoned"
    elif left:
        parent += "; abandoned"
    return f"{parent} (run {lineage.run})"


def _where(checkpoint: Checkpoint) -> str:
    """The kinds of tiers, and how many places of a kind there are."""
    kinds: dict[str, int] = {}
    for place in checkpoint.places:
        kinds[place.tier.name] = kinds.get(place.tier.name, 0) + 1
    return " ".join(kind if n == 1 else f"{kind}:{n}" for kind, n in kinds.items())


def _plain(checkpoint: Checkpoint) -> dict[str, Any]:
    record, lineage = checkpoint.any_record, checkpoint.lineage
    places: dict[str, dict[str, Any]] = {}
    for place in checkpoint.places:
        shards = [c.rank for c in checkpoint.copies if c.place is place and c.record is not None]
        places[place.label] = {"tier": place.tier.name, "path": place.path, "shards": shards}
        coded = {c.rank: c.fragments for c in checkpoint.copies if c.place is place and c.fragments}
        if coded:
            places[place.label]["fragments"] = {rank: asdict(f) for rank, f in coded.items()}
    return {
        "id": checkpoint.id.folder,
        "step": checkpoint.id.step,
        "attempt": checkpoint.id.attempt,
        "branch": checkpoint.branch or None,
        "fork": checkpoint.fork or None,
        "run": None if lineage is None else lineage.run,
        "began": None if lineage is None else lineage.began,
        "parent": None if lineage is None or lineage.parent is None else str(lineage.parent),
        "ancestry": [] if lineage is None else [str(id) for id in lineage.ancestry],
        "created": None if record is None else record.created,
        "bytes": checkpoint.nbytes,
        "world": None if record is None else record.world,
        "whole": checkpoint.whole,
        "state": checkpoint.state,
        "missing": checkpoint.missing,
        "problems": [c.problem for c in checkpoint.damaged],
        "leftovers": [str(left.path) for left in checkpoint.leftovers],
        "places": places,
        "metrics": plain_metrics(checkpoint.metrics),
    }
