"""Checkpoints as what ``sapwood store put`` saves: which one is meant, and what is in it."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sapwood.errors import CheckpointError, ConfigError, SapwoodError

if TYPE_CHECKING:
    from sapwood.cli.verbs.ckpt.survey import Checkpoint
    from sapwood.store.exchange import Incoming

__all__ = ["checkpoint_at", "read_checkpoint"]

_NAME = re.compile(r"\d+(-[0-9a-f]+)?|latest")
"""A step, an id, or ``latest``: what stands behind a place."""
_RUN = "run.toml"
_WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "pytorch_model.bin*")


def checkpoint_at(source: str) -> Checkpoint | None:
    """The checkpoint that a user names: one, or a place or run for its latest; None if it is none.

    Raises:
        SapwoodError: it can only be one, and it is not there.
    """
    from sapwood.cli.verbs.ckpt.survey import find_one

    path = Path(source)
    if path.is_file():
        return None
    named = _NAME.fullmatch(source.rstrip("/").rpartition("/")[2]) is not None
    if source.startswith("s3://") or (named and not path.is_dir()):
        return find_one(source if named else f"{source.rstrip('/')}/latest")
    if not path.is_dir():
        return None
    if named and any(path.iterdir()):
        try:
            return find_one(str(path))
        except SapwoodError:
            pass  # a folder may be called 2024, and be a model of Hugging Face
    if any(any(path.glob(pattern)) for pattern in _WEIGHTS):
        return None
    try:
        return find_one(f"{path}/latest")
    except CheckpointError as error:
        if (path / _RUN).exists():
            raise CheckpointError(
                f"the run {path} has no checkpoint in its folder ({error}); if they are elsewhere, "
                "name that place"
            ) from error
        if _holds_checkpoints(str(path)):
            raise
        return None


def read_checkpoint(
    checkpoint: Checkpoint, advance: Callable[[int], None], *, optimizer: bool
) -> Incoming:
    """Its model, with its metrics and a note of where it comes from.

    Raises:
        CheckpointError: it is not whole, or damaged in every copy there is.
    """
    from sapwood.cli.verbs.ckpt.content import Content, choose
    from sapwood.cli.verbs.ckpt.gathered import gather
    from sapwood.store.exchange import Incoming

    files = ("model", "optimizer") if optimizer else ("model",)
    with Content(checkpoint) as content:
        chosen = choose(content.with_tied(), None, files)
        if not chosen:
            raise ConfigError(f"checkpoint {checkpoint.id} has no tensors of a model")
        value = gather(content, chosen, advance, with_optimizer=optimizer)
    metrics = {key: number for key, number in checkpoint.metrics.items() if number == number}
    lost = sorted(checkpoint.metrics.keys() - metrics.keys())
    said = (f"not a number, and not kept: {', '.join(lost)}",) if lost else ()
    note = _note(checkpoint, optimizer=optimizer)
    return Incoming(value=value, note=note, metrics=metrics, said=said)


def _note(checkpoint: Checkpoint, *, optimizer: bool) -> dict[str, Any]:
    """Where a version comes from; the lineage is that of the checkpoint's attempt."""
    lineage = checkpoint.lineage
    record = checkpoint.readable()
    facts: dict[str, Any] = {
        "checkpoint": checkpoint.id.folder,
        "step": checkpoint.id.step,
        "attempt": checkpoint.id.attempt,
        "ranks": record.world,
        "created": record.created,
        "optimizer": optimizer,
        "places": [place.label for place in checkpoint.places],
    }
    if checkpoint.branch:
        facts["branch"] = checkpoint.branch
    if checkpoint.fork:
        facts["fork"] = checkpoint.fork
    if lineage is not None:
        facts["run"] = lineage.run
        facts["root"] = lineage.root
        facts["began"] = lineage.began if math.isfinite(lineage.began) else None
        facts["restored"] = [id.folder for id in lineage.ancestry]
    return {"from": checkpoint.id.folder, "imported": facts}


def _holds_checkpoints(place: str) -> bool:
    from sapwood.cli.verbs.ckpt.places import find_tiers

    try:
        return bool(find_tiers(place))
    except SapwoodError:
        return False
