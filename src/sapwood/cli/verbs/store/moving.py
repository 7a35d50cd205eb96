"""``sapwood store get`` and ``put``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from sapwood.cli.verbs.store.place import At, opened
from sapwood.cli.words import progress, size
from sapwood.errors import ConfigError

__all__ = ["get", "put"]


def get(model: str, out: Path, /, *, at: At = None) -> None:
    """Write a version into a file that other tools read; a file that exists is never overwritten.

    ```
    sapwood store get resnet50@best model.safetensors
    sapwood store get nt3/run7 model.pt
    ```

    Args:
        model: `name@version`, `name@tag`, or a name.
        out: The file to write: .safetensors, .pt or .pth.
        at: The repository.
    """
    from sapwood.store.exchange import write_model

    with opened(at) as repo:
        stored = repo.open(model)
        with progress("writing", stored.manifest.nbytes) as advance:
            nbytes = write_model(stored, out, advance=advance)
    print(f"wrote {out}: {stored.record.reference}, {len(stored)} tensors, {size(nbytes)}")


def put(
    path: Path,
    model: str,
    /,
    *,
    at: At = None,
    parent: str | None = None,
    tag: Annotated[tuple[str, ...], Parameter(negative="")] = (),
    metric: Annotated[tuple[str, ...], Parameter(negative="")] = (),
) -> None:
    """Save a file's model as a new version; the repository is made if it is not there.

    Reads .safetensors files, what `torch.save` wrote (without ever running code from it), and
    folders with safetensors files, as Hugging Face has them.

    ```
    sapwood store put weights.safetensors resnet50@imagenet
    sapwood store put model.pt nt3/run7 --parent nt3/run7@12 --tag best --metric val_acc=0.93
    ```

    Args:
        path: A file, or a folder.
        model: `name@version`, or a name, which takes the next number.
        at: The repository.
        parent: The version it comes from: tensors that are still the same take no room.
        tag: A tag that shall point to it; may be given several times.
        metric: A number to remember, as name=value; may be given several times.
    """
    from sapwood.store.exchange import read_model

    metrics = dict(map(_metric, metric))
    with opened(at, create=True) as repo:
        value, note = read_model(path)
        record = repo.save(value, model, parent=parent, tags=tag, metrics=metrics, note=note)
    print(f"saved {record.reference}: {record.tensors} tensors, {size(record.nbytes)}")


def _metric(text: str) -> tuple[str, float]:
    key, equals, value = text.partition("=")
    try:
        if key and equals:
            return key, float(value)
    except ValueError:
        pass
    raise ConfigError(f"--metric is {text!r}, expected a name and a number, such as val_acc=0.93")
