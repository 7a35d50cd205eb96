"""``sapwood data index | inspect | verify``."""

from __future__ import annotations

from typing import Annotated, Any

from cyclopts import Parameter

from sapwood.cli.words import progress, size

__all__ = ["index", "inspect", "verify"]

Json = Annotated[bool, Parameter(negative="")]


def index(database: str, *, name: str | None = None, to: str | None = None) -> None:
    """Note where every record is, so that reading starts at once.

    Only branch and leaf pages are read: 0.7 % of a database of 3 KB records. An index that fits
    the database is made again all the same.

    ```
    sapwood data index train.mdb
    sapwood data index /data/imagenet --name train --to /scratch/train.index
    ```

    Args:
        database: An LMDB file, or a folder with data.mdb in it.
        name: A named database; the main one if none is given.
        to: Where to write the index; beside the database if it is not given.
    """
    from sapwood.data import index_file, save_index

    made = _walk(database, name, thorough=False)
    kept = to if to is not None else index_file(database, name)
    save_index(made, kept)
    print(f"{kept}: {len(made)} records, {size(int(made.lengths.sum()))}")


def inspect(database: str, *, name: str | None = None, json: Json = False) -> None:
    """Show what is in a database: records, their sizes, and the databases named in it.

    ```
    sapwood data inspect train.mdb
    sapwood data inspect train.mdb --name labels --json
    ```

    Args:
        database: An LMDB file, or a folder with data.mdb in it.
        name: A named database; the main one if none is given.
        json: Write JSON instead of text.
    """
    from sapwood.cli.output import print_json
    from sapwood.data import list_databases, read_about

    made = _walk(database, name, thorough=False)
    facts: dict[str, Any] = {
        "file": str(made.file),
        "records": len(made),
        "bytes": int(made.lengths.sum()),
        "shortest": int(made.lengths.min()) if len(made) else None,
        "longest": int(made.lengths.max()) if len(made) else None,
        "with pages of their own": int(made.overflow.sum()),
        "page size": made.page_size,
        "transaction": made.fingerprint.txnid,
        "flags": made.flags,
        "named": {
            one.decode(errors="replace"): found.entries
            for one, found in list_databases(database).items()
        },
        "about": read_about(database),
    }
    if json:
        print_json(facts)
        return
    named, about = facts.pop("named"), facts.pop("about")
    for what, value in facts.items():
        print(f"{what + ':':<25}{value}")
    for one, entries in named.items():
        print(f"{'named:':<25}{one}, {entries} records")
    if about is not None:
        _show_about(about)


def _show_about(about: dict[str, Any]) -> None:
    print(f"{'converted from:':<25}{about['kind']}")
    for column, facts in about["columns"].items():
        if facts:
            text = ", ".join(f"{what} {value}" for what, value in facts.items())
            print(f"{'column:':<25}{column or 'the main database'}, {text}")
    if about.get("classes"):
        print(f"{'classes:':<25}{len(about['classes'])}")


def verify(database: str, *, name: str | None = None) -> None:
    """Check every page that a record needs, of all databases in the file, and kept indexes.

    On damage the exit code is 1, and the message says which page it is and what was expected there.
    LMDB has no checksums, so some damage cannot be noticed: above all a flipped bit inside of a key
    or a value, and in a value's length as long as it needs the same pages.

    ```
    sapwood data verify train.mdb
    sapwood data verify /data/imagenet --name train
    ```

    Args:
        database: An LMDB file, or a folder with data.mdb in it.
        name: Only this named database; all of them and the main one if none is given.
    """
    from sapwood.data import list_databases

    for one in [name] if name is not None else [None, *sorted(list_databases(database))]:
        _verify(database, one)


def _verify(database: str, name: str | bytes | None) -> None:
    import numpy as np

    from sapwood.data import index_file, load_index
    from sapwood.errors import DataError

    made = _walk(database, name, thorough=True)
    which = "" if made.database is None else f", {made.database.decode(errors='replace')!r}"
    print(f"{made.file}{which}: {len(made)} records: every page is as it should be")
    kept = index_file(database, name)
    if not kept.exists():
        return
    found = load_index(kept, database, name)
    for one in ("offsets", "lengths", "key_offsets", "key_lengths"):
        if not np.array_equal(getattr(found, one), getattr(made, one)):
            raise DataError(f"{kept}: expected the {one} of the database; make it again")
    print(f"{kept}: fits the database")


def _walk(database: str, name: str | bytes | None, *, thorough: bool) -> Any:
    from sapwood.data import build_index, list_databases
    from sapwood.data.pagefile import open_pages

    wanted = name.encode() if isinstance(name, str) else name
    with open_pages(database) as file:
        found = file.meta.main
        if wanted is not None:
            found = list_databases(database).get(wanted, found)
        pages = found.branches + found.leaves + (found.overflows if thorough else 0)
        total = min(pages * file.page_size, file.size)
    with progress("reading pages", total) as advance:
        return build_index(database, name, thorough=thorough, progress=advance)
