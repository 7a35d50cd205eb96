"""``sapwood data convert | compact``."""

from __future__ import annotations

from typing import Annotated, Literal

from cyclopts import Parameter

from sapwood.cli.process import ending_in_order
from sapwood.cli.values import Whole
from sapwood.cli.words import progress, size

__all__ = ["compact", "convert"]

Flag = Annotated[bool, Parameter(negative="")]
Several = Annotated[list[str] | None, Parameter(negative="")]


def convert(
    source: str,
    dest: str,
    *,
    kind: Literal["folder", "npy", "tar", "safetensors"] | None = None,
    column: Several = None,
    suffix: Several = None,
    whole: Flag = False,
    shuffle: Whole | None = None,
    force: Flag = False,
) -> None:
    """Make an LMDB database of images, arrays or tar files; their bytes are kept as they are.

    SOURCE is a folder of images (a folder inside of it for each class), a `.npy` file (the first
    axis counts records), a `.tar` file as webdataset has them (also `.tar.gz`, `.tar.bz2`,
    `.tar.xz`), a `.safetensors` file (tensors whose first axis counts records), or a folder of
    files of one of these kinds. DEST is there when it is complete, or not at all.

    Keys are numbers. Labels of a folder are in the database `.labels`, names in `.names`. What has
    several columns (endings in a tar file, tensors) gets a database for each, all with the same
    keys; one column alone is the main database.

    ```
    sapwood data convert photos/train train.mdb --shuffle 0
    sapwood data convert x.npy x.mdb
    sapwood data convert shards/ train.mdb --column jpg --column cls
    sapwood data convert set.safetensors set.mdb --column images
    ```

    Args:
        source: What to convert.
        dest: The file to write.
        kind: What the source is, if its name does not say it.
        column: Only this ending of a tar file's members, or this tensor; may be given several
            times.
        suffix: Take the files of a folder that end so, in place of images; several times.
        whole: Each array is one record, and not each of its rows.
        shuffle: A seed to write records in an order drawn from it. Use it for folders of classes.
        force: Replace a file that is there.
    """
    from sapwood.data import convert as make

    with ending_in_order():
        made = make(
            source,
            dest,
            kind=kind,
            columns=column,
            suffixes=suffix,
            whole=whole,
            shuffle=shuffle,
            force=force,
            phase=progress,
        )
    print(f"{made.file}: {made.records} records, {size(made.file_bytes)}")
    named = [one for one in made.databases if one]
    if named:
        print(f"named databases with the same keys: {', '.join(named)}")


def compact(source: str, dest: str, *, force: Flag = False, quick: Flag = False) -> None:
    """Copy a database such that records lie in the order of keys, and no page is free.

    The copy is walked and compared with the source byte for byte before it gets its name.

    ```
    sapwood data compact old.mdb new.mdb
    sapwood data compact /data/imagenet imagenet.mdb --quick
    sapwood data compact train.mdb train.mdb --force
    ```

    Args:
        source: An LMDB file, or a folder with data.mdb in it.
        dest: The file to write.
        force: Replace a file that is there, be it the source.
        quick: Check all pages of the copy, but do not compare its bytes.
    """
    from sapwood.data import compact as make

    with ending_in_order():
        made = make(source, dest, force=force, compare=not quick, phase=progress)
    saved = made.before - made.after
    print(
        f"{made.file}: {made.records} records in {made.databases} databases, {size(made.before)} "
        f"before, {size(made.after)} after ({saved / max(made.before, 1):.1%} less)"
    )
