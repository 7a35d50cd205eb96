"""``sapwood ckpt prune``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from cyclopts import Parameter

from sapwood.checkpoint import retention
from sapwood.cli.verbs.ckpt.places import DEFAULT_PLACE, find_places
from sapwood.cli.verbs.ckpt.survey import Checkpoint, survey
from sapwood.cli.words import age, size
from sapwood.errors import ConfigError, SapwoodError
from sapwood.runtime.durations import parse_seconds

__all__ = ["prune"]

_Flag = Annotated[bool, Parameter(negative="")]


def prune(
    *places: str,
    last: int | None = None,
    every: int | None = None,
    best: str | None = None,
    lower: _Flag = False,
    higher: _Flag = False,
    spaced: str | None = None,
    yes: _Flag = False,
) -> int:
    """Remove checkpoints that no rule keeps; the newest whole one always stays.

    What any of the rules keeps is kept. Without `--yes` it only says what would go. A checkpoint
    that is not whole is left alone: see `sapwood ckpt repair`.

    ```
    sapwood ckpt prune --last 3                          say what would go
    sapwood ckpt prune --last 3 --every 1000 --yes       keep the newest 3, and each 1000th step
    sapwood ckpt prune --best loss --lower --last 1      keep the best one, and the newest
    sapwood ckpt prune /data/ckpts --spaced 1h --yes     keep one an hour
    ```

    Args:
        places: Folders or s3:// URLs; ckpts if none is given.
        last: Keep the newest N.
        every: Keep steps that are multiples of K.
        best: Keep the one with the best value of this metric.
        lower: For --best: less is better.
        higher: For --best: more is better.
        spaced: Keep checkpoints at least this far apart: 90s, 15m, 1h, 2d.
        yes: Remove them.
    """
    keep = _policy(last, every, best, spaced, lower=lower, higher=higher)
    found = survey(find_places(places or (DEFAULT_PLACE,)))
    whole = {c.id: c for c in found if c.whole}
    saved = [
        retention.Saved(id=c.id, created=c.created, metrics=c.metrics, lineage=c.lineage)
        for c in whole.values()
    ]
    going = [whole[id] for id in retention.to_drop(saved, keep)]
    for checkpoint in going:
        verb = "removing" if yes else "would remove"
        print(f"{verb} {checkpoint.id} ({age(checkpoint.age)} old, {size(checkpoint.nbytes)})")
    failed = _drop(going) if yes else []
    for sentence in failed:
        print(sentence)
    _conclude(going, len(whole), len(found) - len(whole), yes=yes)
    return int(bool(failed))


def _policy(
    last: int | None,
    every: int | None,
    best: str | None,
    spaced: str | None,
    *,
    lower: bool,
    higher: bool,
) -> retention.Policy:
    rules = []
    if last is not None:
        rules.append(retention.last(last))
    if every is not None:
        rules.append(retention.every(every))
    if best is not None:
        if lower == higher:
            raise ConfigError(f"--best {best}: say --lower or --higher, whichever is better")
        rules.append(retention.best(1, best, lower=lower))
    elif lower or higher:
        raise ConfigError("--lower and --higher belong to --best METRIC")
    if spaced is not None:
        rules.append(retention.spaced(parse_seconds(spaced, "--spaced")))
    if not rules:
        raise ConfigError("say what to keep: --last N, --every K, --best METRIC or --spaced 1h")
    return retention.any_of(*rules)


def _drop(going: Sequence[Checkpoint]) -> list[str]:
    """Remove each from every place; one that cannot be removed must not keep the others."""
    failed = []
    for checkpoint in going:
        for place in checkpoint.places:
            try:
                place.tier.drop(checkpoint.id)
            except SapwoodError as error:
                failed.append(f"{checkpoint.id} is still in {place.label}: {error}")
    return failed


def _conclude(going: Sequence[Checkpoint], whole: int, broken: int, *, yes: bool) -> None:
    freed = size(sum(c.nbytes or 0 for c in going))
    word = "removed" if yes else "would go"
    print(f"{len(going)} of {whole} whole checkpoints {word} ({freed}); {whole - len(going)} stay")
    if broken:
        print(
            f"{broken} that are not whole were left alone; `sapwood ckpt repair` looks after them"
        )
    if going and not yes:
        print("nothing was removed; add --yes to do it")
