"""``sapwood ckpt ls``."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

from cyclopts import Parameter

from sapwood.cli.verbs.ckpt.places import DEFAULT_PLACE, find_places
from sapwood.cli.verbs.ckpt.survey import Checkpoint, survey
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

    ```
    sapwood ckpt ls                          the checkpoints under ckpts/
    sapwood ckpt ls /data/ckpts /scratch     two places together, as a restore sees them
    sapwood ckpt ls s3://bucket/run7
    sapwood ckpt ls --json                   the same for a program
    ```

    Args:
        places: Folders or s3:// URLs; ckpts if none is given.
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

    numbers = ("step", "age", "size", "world")
    made = table(
        "step", "attempt", "age", "size", "world", "state", "where", "metrics", right=numbers
    )
    for checkpoint in found:
        record = checkpoint.any_record
        made.add_row(
            str(checkpoint.id.step),
            checkpoint.id.attempt,
            age(checkpoint.age),
            size(checkpoint.nbytes),
            "-" if record is None else str(record.world),
            Text(checkpoint.state, style="green" if checkpoint.state == "whole" else "yellow"),
            Text(_where(checkpoint)),
            Text(" ".join(f"{k}={v:g}" for k, v in checkpoint.metrics.items())),
        )
    console().print(made)
    for checkpoint in found:
        for copy in checkpoint.damaged:
            console().print(Text(f"{checkpoint.id}, shard {copy.rank}: {copy.problem}"))


def _where(checkpoint: Checkpoint) -> str:
    """The kinds of tiers, and how many places of a kind there are."""
    kinds: dict[str, int] = {}
    for place in checkpoint.places:
        kinds[place.tier.name] = kinds.get(place.tier.name, 0) + 1
    return " ".join(kind if n == 1 else f"{kind}:{n}" for kind, n in kinds.items())


def _plain(checkpoint: Checkpoint) -> dict[str, Any]:
    record = checkpoint.any_record
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
