"""``sapwood ckpt export``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from sapwood.cli.verbs.ckpt.content import Content, choose
from sapwood.cli.verbs.ckpt.places import DEFAULT_PLACE
from sapwood.cli.verbs.ckpt.survey import find_one
from sapwood.cli.words import progress, size
from sapwood.errors import ConfigError, TierError
from sapwood.state.catalog import Entry, FileLayout
from sapwood.storage.files import Files
from sapwood.storage.newfile import new_file

__all__ = ["export"]

_TORCH = (".pt", ".pth")


def export(
    checkpoint: str,
    out: Path,
    /,
    *,
    place: str = DEFAULT_PLACE,
    tensors: str | None = None,
    optimizer: Annotated[bool, Parameter(negative="")] = False,
) -> None:
    """Write a checkpoint's model into one file that other tools read.

    A `.safetensors` file is written without loading torch and needs little memory. A `.pt` file is
    what `torch.save(model.state_dict())` writes; with `--optimizer` it is a dictionary of `model`,
    `optimizer` (state by parameter name, and the settings of the groups) and `step`. Either loads
    strictly into the model it came from: tied weights are there under each of their names, in a
    `.safetensors` file with a copy for each. All that is read is verified; a file that exists is
    never overwritten.

    ```
    sapwood ckpt export latest model.safetensors
    sapwood ckpt export 15 model.pt --optimizer
    sapwood ckpt export 15 encoder.safetensors --tensors 'encoder.*'
    sapwood ckpt export s3://bucket/run7/latest model.safetensors
    ```

    Args:
        checkpoint: A step, an id, or latest; a place may stand before it.
        out: The file to write: .safetensors, .pt or .pth.
        place: Where to look.
        tensors: Only tensors whose name fits this pattern.
        optimizer: The optimizer's state as well.
    """
    if out.suffix not in (".safetensors", *_TORCH):
        raise ConfigError(f"{out}: expected a file that ends in .safetensors, .pt or .pth")
    if out.exists():
        raise ConfigError(f"{out} exists and is never overwritten; choose another name")
    files = ("model", "optimizer") if optimizer else ("model",)
    with Content(find_one(checkpoint, place)) as content:
        chosen = choose(content.with_tied(), tensors, files)
        with progress("exporting", sum(e.nbytes for e in chosen)) as advance, _draft(out) as draft:
            write = _write_torch if out.suffix in _TORCH else _write_safetensors
            write(content, chosen, draft, advance, with_optimizer=optimizer)
    print(f"wrote {out}: {len(chosen)} tensors, {size(out.stat().st_size)}")


@contextmanager
def _draft(out: Path) -> Iterator[Path]:
    try:
        with new_file(out) as draft:
            yield draft
    except OSError as error:
        raise TierError(f"cannot write {out}: {error.strerror or error}") from error


def _write_safetensors(
    content: Content,
    chosen: Sequence[Entry],
    draft: Path,
    advance: Callable[[int], None],
    *,
    with_optimizer: bool,
) -> None:
    layout = FileLayout(draft.stem, chosen)
    tied = content.tied()
    sources = {e.name: tied[e.key].key if e.key in tied else e.key for e in chosen}
    with Files().create(draft) as writer:
        writer.write_at(0, layout.header)
        for entry in layout.entries:
            at = layout.start(entry.name)
            for block in content.blocks(sources[entry.name]):
                writer.write_at(at, block)
                at += len(block)
                advance(len(block))


def _write_torch(
    content: Content,
    chosen: Sequence[Entry],
    draft: Path,
    advance: Callable[[int], None],
    *,
    with_optimizer: bool,
) -> None:
    import torch

    from sapwood.cli.verbs.ckpt.gathered import gather

    value = gather(content, chosen, advance, with_optimizer=with_optimizer)
    # Given a path, torch opens it itself and raises RuntimeError where that fails.
    with draft.open("xb") as file:
        torch.save(value, file)
