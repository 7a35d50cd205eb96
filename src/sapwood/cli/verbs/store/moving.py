"""``sapwood store get`` and ``put``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from sapwood.cli.verbs.store.place import At, opened
from sapwood.cli.words import progress, size
from sapwood.errors import ConfigError

if TYPE_CHECKING:
    from sapwood.store.exchange import Incoming

__all__ = ["get", "put"]


def get(
    model: str,
    out: Path,
    /,
    *,
    at: At = None,
    shard_size: Annotated[str | None, Parameter()] = None,
) -> None:
    """Write a version into a file or folder that other tools read; nothing is ever overwritten.

    A folder gets every file that was kept with the version, byte for byte, and its weights as
    safetensors files, called and split as they came: what transformers and others load.

    ```
    sapwood store get resnet50@best model.safetensors
    sapwood store get nt3/run7 model.pt
    sapwood store get llama@base llama/
    sapwood store get llama@base llama/ --shard-size 5GB
    ```

    Args:
        model: `name@version`, `name@tag`, or a name.
        out: The file to write, .safetensors, .pt or .pth; any other name is a folder.
        at: The repository.
        shard_size: Split the weights of a folder into files of at most this size.
    """
    from sapwood.store.exchange import write_model
    from sapwood.store.finding import parse_size

    most = None if shard_size is None else parse_size(shard_size)
    with opened(at) as repo:
        stored = repo.open(model)
        with progress("writing", stored.manifest.nbytes) as advance:
            nbytes = write_model(stored, out, shard_bytes=most, advance=advance)
    print(f"wrote {out}: {stored.record.reference}, {len(stored)} tensors, {size(nbytes)}")


def put(
    source: str,
    model: str,
    /,
    *,
    at: At = None,
    parent: str | None = None,
    tag: Annotated[tuple[str, ...], Parameter(negative="")] = (),
    metric: Annotated[tuple[str, ...], Parameter(negative="")] = (),
    without: Annotated[tuple[str, ...], Parameter(negative="")] = (),
    optimizer: Annotated[bool, Parameter(negative="")] = False,
) -> None:
    """Save the model of a file, folder, run or checkpoint as a new version.

    The repository is made if it is not there.

    Reads .safetensors files, what `torch.save` wrote (without ever running code from it), and
    folders with either, as Hugging Face has them: every other file of such a folder is kept with
    the version, byte for byte. Of a run, or of a place of checkpoints, it takes the latest one; its
    metrics are kept, and where it comes from.

    ```
    sapwood store put weights.safetensors resnet50@imagenet
    sapwood store put hf-folder/ llama@base --without '*.gguf'
    sapwood store put runs/20261119-0042-3f9a1c nt3/run7@end --tag best
    sapwood store put ckpts/1500 nt3/run7@1500 --optimizer
    sapwood store put model.pt nt3/run7 --parent nt3/run7@12 --tag best --metric val_acc=0.93
    ```

    Args:
        source: A file, a folder, a run's folder, a place of checkpoints, or one of them: a step, an
            id or latest behind its place.
        model: `name@version`, or a name, which takes the next number.
        at: The repository.
        parent: The version it comes from: tensors that are still the same take no room.
        tag: A tag that shall point to it; may be given several times.
        metric: A number to remember, as name=value; may be given several times.
        without: Files of a folder to leave out, as a pattern; may be given several times.
        optimizer: Of a checkpoint, the optimizer's state as well.
    """
    metrics = dict(map(_metric, metric))
    found = _read(source, without, optimizer=optimizer)
    with opened(at, create=True) as repo:
        record = repo.save(
            found.value,
            model,
            parent=parent,
            tags=tag,
            metrics={**found.metrics, **metrics},
            note=found.note,
            files=found.files,
        )
    for line in found.said:
        print(line)
    files = f" and {len(found.files)} files" if found.files else ""
    print(f"saved {record.reference}: {record.tensors} tensors{files}, {size(record.nbytes)}")


def _read(source: str, without: tuple[str, ...], *, optimizer: bool) -> Incoming:
    from sapwood.cli.verbs.store.checkpoints import checkpoint_at, read_checkpoint
    from sapwood.store.exchange import read_model

    checkpoint = checkpoint_at(source)
    if checkpoint is None:
        if optimizer:
            raise ConfigError(f"--optimizer is for checkpoints, and {source} is none")
        return read_model(Path(source), without=without)
    if without:
        raise ConfigError(f"--without is for folders of files, and {source} is a checkpoint")
    with progress("reading", checkpoint.nbytes or 0) as advance:
        return read_checkpoint(checkpoint, advance, optimizer=optimizer)


def _metric(text: str) -> tuple[str, float]:
    key, equals, value = text.partition("=")
    try:
        if key and equals:
            return key, float(value)
    except ValueError:
        pass
    raise ConfigError(f"--metric is {text!r}, expected a name and a number, such as val_acc=0.93")
