"""``sapwood store ls``, ``find`` and ``show``."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from sapwood.cli.verbs.store.place import At, Json, opened, plain
from sapwood.cli.words import age, size

if TYPE_CHECKING:
    from sapwood.repository.base import ModelRecord

__all__ = ["find", "ls", "show"]


def ls(pattern: str = "*", /, *, at: At = None, json: Json = False) -> None:
    """List versions, by name, oldest first: how old, how large, tags and metrics.

    ```
    sapwood store ls
    sapwood store ls 'nt3/*'            names that fit a pattern
    sapwood store ls --at /data/models --json
    ```

    Args:
        pattern: Of names; `*` fits any part of one.
        at: The repository.
        json: Write JSON instead of a table.
    """
    with opened(at) as repo:
        found = repo.models(pattern)
    _show(found, json=json)


def find(
    expression: str,
    /,
    *,
    at: At = None,
    by: str | None = None,
    lower: Annotated[bool, Parameter(negative="")] = False,
    json: Json = False,
) -> int:
    """List the versions that fit an expression. The exit code is 1 if none does.

    *METRIC*, *size*, *tensors*, *created* and *age* are compared with `<`, `<=`, `>`, `>=`, `=` and
    `!=`; *name*, *version* and *tag* with `=`, `!=`, and `~` for a pattern; `has METRIC` asks
    whether there is one. `and`, `or`, `not` and parentheses put them together.

    ```
    sapwood store find 'val_acc > 0.9 and size < 1GB'
    sapwood store find 'name ~ "nt3/*" and not tag = broken' --by val_acc
    sapwood store find 'age < 7d or created > 2026-11-19T14:30'
    ```

    Args:
        expression: What they must fit; one with spaces or `<` needs the shell's quotes.
        at: The repository.
        by: The best by this metric first; otherwise by name, oldest first.
        lower: With `--by`, less is better.
        json: Write JSON instead of a table.
    """
    with opened(at) as repo:
        found = repo.find(expression, by=by, lower=lower)
    _show(found, json=json)
    return int(not found)


def _show(found: Sequence[ModelRecord], *, json: bool) -> None:
    from sapwood.cli.output import console, print_json, table

    if json:
        print_json([plain(record) for record in found])
        return
    made = table(
        "model", "age", "size", "tensors", "tags", "metrics", right=("age", "size", "tensors")
    )
    for record in found:
        made.add_row(
            str(record.reference),
            age(time.time() - record.created),
            size(record.nbytes),
            str(record.tensors),
            " ".join(record.tags),
            " ".join(f"{key}={value:g}" for key, value in record.metrics.items()),
        )
    console().print(made)


def show(model: str, /, *, at: At = None, json: Json = False) -> None:
    """Show a version: what it comes from, and each of its tensors.

    ```
    sapwood store show resnet50
    sapwood store show nt3/run7@best --json
    ```

    Args:
        model: `name@version`, `name@tag`, or a name.
        at: The repository.
        json: Write JSON instead of text.
    """
    from sapwood.cli.output import console, print_json, table

    with opened(at) as repo:
        stored = repo.open(model)
        parents = [str(record.reference) for record in repo.log(str(stored.record.reference))[1:]]
    record = stored.record
    rows = [(name, stored.manifest.row(number)) for name, number in stored.manifest.names]
    if json:
        tensors = [
            {"name": name, "dtype": row.dtype, "shape": list(row.shape), "bytes": row.nbytes}
            for name, row in rows
        ]
        files = {name: stored.file_row(name).nbytes for name in stored.files}
        print_json({**plain(record), "from": parents, "files": files, "tensor": tensors})
        return
    print(f"{record.reference}: {size(record.nbytes)}, {record.tensors} tensors")
    if stored.files:
        print(f"files: {' '.join(stored.files)}")
    if record.tags:
        print(f"tags: {' '.join(record.tags)}")
    for key, value in record.metrics.items():
        print(f"{key}: {value:g}")
    if parents:
        print(f"from: {' < '.join(parents)}")
    made = table("tensor", "dtype", "shape", "size", right=("size",))
    for name, row in rows:
        made.add_row(name, row.dtype, " x ".join(map(str, row.shape)) or "-", size(row.nbytes))
    console().print(made)
