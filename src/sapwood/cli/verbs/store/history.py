"""``sapwood store log`` and ``diff``."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Annotated

from cyclopts import Parameter

from sapwood.cli.verbs.store.place import At, Json, opened, plain
from sapwood.cli.words import age, size

__all__ = ["diff", "log"]


def log(model: str, /, *, at: At = None, json: Json = False) -> None:
    """Show what a version comes from, newest first; also versions that were removed.

    ```
    sapwood store log nt3/run7@best
    ```

    Args:
        model: `name@version`, `name@tag`, or a name.
        at: The repository.
        json: Write JSON instead of text.
    """
    from sapwood.cli.output import print_json

    with opened(at) as repo:
        found = repo.log(model)
    if json:
        print_json([plain(record) for record in found])
        return
    for record in found:
        gone = ", removed" if record.removed is not None else ""
        tags = f" ({', '.join(record.tags)})" if record.tags else ""
        metrics = "".join(f"  {key}={value:g}" for key, value in record.metrics.items())
        old = age(time.time() - record.created)
        print(f"{record.reference}{tags}  {old} old, {size(record.nbytes)}{gone}{metrics}")


def diff(
    before: str,
    after: str,
    /,
    *,
    at: At = None,
    everything: Annotated[bool, Parameter(name="--all", negative="")] = False,
    json: Json = False,
) -> int:
    """Compare two versions, tensor by tensor, and their files. The exit code is 1 if they differ.

    *largest* is the largest difference of two elements; *relative* the norm of the difference,
    divided by the norm before.

    ```
    sapwood store diff nt3/run7@1 nt3/run7@2
    sapwood store diff nt3/run7@1 nt3/run7@2 --all     also tensors that are the same
    ```

    Args:
        before: The earlier version.
        after: The later version.
        at: The repository.
        everything: Also tensors that are the same.
        json: Write JSON instead of a table.
    """
    from sapwood.cli.output import console, print_json, table

    with opened(at) as repo:
        changes = repo.diff(before, after)
        files = repo.diff_files(before, after)
    other_files = {name: kind for name, kind in files.items() if kind != "same"}
    different = [change for change in changes if change.kind != "same"]
    if json:
        tensors = [asdict(change) for change in (changes if everything else different)]
        chosen = files if everything else other_files
        kept = [{"name": name, "kind": kind, "file": True} for name, kind in chosen.items()]
        print_json([*tensors, *kept])
        return int(bool(different or other_files))
    made = table("tensor", "change", "largest", "relative", right=("largest", "relative"))
    for change in changes if everything else different:
        numbers = ("", "")
        if change.kind == "changed":
            numbers = (f"{change.largest:.3g}", f"{change.relative:.3g}")
        made.add_row(change.name, change.kind, *numbers)
    if made.row_count:
        console().print(made)
    for name, kind in (files if everything else other_files).items():
        print(f"file {name}: {kind}")
    print(f"{len(changes) - len(different)} of {len(changes)} tensors are the same")
    return int(bool(different or other_files))
