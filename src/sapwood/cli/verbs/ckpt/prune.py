"""``sapwood ckpt prune``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated

from cyclopts import Parameter

from sapwood.checkpoint import retention
from sapwood.cli.verbs.ckpt.better import check_metric, less_is_better
from sapwood.cli.verbs.ckpt.diagnosis import bytes_of, why_unsound
from sapwood.cli.verbs.ckpt.places import DEFAULT_PLACE, find_places
from sapwood.cli.verbs.ckpt.survey import Checkpoint, survey
from sapwood.cli.words import age, progress, size
from sapwood.errors import ConfigError, SapwoodError
from sapwood.runtime.durations import parse_seconds
from sapwood.tiers.record import CheckpointId

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
    """Remove checkpoints that no rule keeps; the newest sound one always stays.

    What any of the rules keeps is kept. Before anything goes, every byte of what stays is read and
    verified: one that is damaged counts for no rule, and is left alone, as is one that is not whole
    (see `sapwood ckpt repair`). Without `--yes` it only says what would go. The exit code is 1 if
    something is damaged, or could not be removed.

    ```
    sapwood ckpt prune --last 3                          say what would go
    sapwood ckpt prune --last 3 --every 1000 --yes       keep the newest 3, and each 1000th step
    sapwood ckpt prune --last 3 --best loss              keep the best one, and the newest 3
    sapwood ckpt prune --best score --higher             which way is better, where no name says so
    sapwood ckpt prune /data/ckpts --spaced 1h --yes     keep one an hour
    ```

    Args:
        places: Folders, s3:// URLs or store://models/; ckpts if none is given.
        last: Keep the newest N.
        every: Keep steps that are multiples of K.
        best: Keep the one with the best value of this metric.
        lower: For --best: less is better; so it is for a loss or an error.
        higher: For --best: more is better; so it is for an accuracy or an F1 score.
        spaced: Keep checkpoints at least this far apart: 90s, 15m, 1h, 2d.
        yes: Remove them.
    """
    keep = _policy(last, every, best, spaced, lower=lower, higher=higher)
    found = survey(find_places(places or (DEFAULT_PLACE,)))
    whole = {c.id: c for c in found if c.whole}
    if best is not None:
        check_metric(best, whole.values())
    going, damaged = _decide(whole, keep)
    for id, why in damaged.items():
        print(f"{id} is damaged, counts for no rule and is left alone: {why}")
    for checkpoint in going:
        verb = "removing" if yes else "would remove"
        print(f"{verb} {checkpoint.id} ({age(checkpoint.age)} old, {size(checkpoint.nbytes)})")
    failed = _drop(going) if yes else []
    for sentence in failed:
        print(sentence)
    sound = len(whole) - len(damaged)
    _conclude(going, sound, len(found) - sound, yes=yes)
    return int(bool(failed or damaged))


def _decide(
    whole: Mapping[CheckpointId, Checkpoint], keep: retention.Policy
) -> tuple[list[Checkpoint], dict[CheckpointId, str]]:
    """What goes, once all that stays was verified; and what is damaged, and why.

    Where one that was to stay is damaged, another has to stay in its place, and is verified too.
    """
    damaged: dict[CheckpointId, str] = {}
    verified: set[CheckpointId] = set()
    while True:
        sound = [c for id, c in whole.items() if id not in damaged]
        saved = [
            retention.Saved(id=c.id, created=c.created, metrics=c.metrics, lineage=c.lineage)
            for c in sound
        ]
        going = retention.to_drop(saved, keep)
        doubted = [c for c in sound if c.id not in going and c.id not in verified]
        if not going or not doubted:
            return [whole[id] for id in going], damaged
        with progress("verifying what stays", bytes_of(doubted)) as advance:
            for checkpoint in doubted:
                why = why_unsound(checkpoint, advance)
                if why is not None:
                    damaged[checkpoint.id] = why
                verified.add(checkpoint.id)


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
        rules.append(retention.best(1, best, lower=less_is_better(best, lower, higher)))
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


def _conclude(going: Sequence[Checkpoint], sound: int, broken: int, *, yes: bool) -> None:
    freed = size(sum(c.nbytes or 0 for c in going))
    word = "removed" if yes else "would go"
    print(f"{len(going)} of {sound} whole checkpoints {word} ({freed}); {sound - len(going)} stay")
    if broken:
        print(
            f"{broken} that are not whole were left alone; `sapwood ckpt repair` looks after them"
        )
    if going and not yes:
        print("nothing was removed; add --yes to do it")
