"""``sapwood ckpt diff``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from sapwood.cli.verbs.ckpt.content import Content, choose
from sapwood.cli.verbs.ckpt.places import DEFAULT_PLACE
from sapwood.cli.verbs.ckpt.survey import find_one
from sapwood.cli.words import progress, size
from sapwood.state.catalog import Catalog, Entry

if TYPE_CHECKING:
    from sapwood.cli.verbs.ckpt.numbers import Difference

__all__ = ["diff"]

_BLOCK = 4 * 2**20  # a multiple of every element's size


@dataclass(frozen=True, kw_only=True)
class _Row:
    """One tensor in both checkpoints, or in one."""

    entry: Entry
    what: str
    """same, changed, only in A, only in B, or other kind."""
    other: Entry | None = None
    apart: Difference | None = None


def diff(
    a: str,
    b: str,
    /,
    *,
    place: str = DEFAULT_PLACE,
    tensors: str | None = None,
    json: Annotated[bool, Parameter(negative="")] = False,
) -> int:
    """Compare two checkpoints, tensor by tensor, also of runs on other numbers of ranks.

    Shows tensors that only one of them has, tensors of another shape or dtype, and of the others
    how many elements differ and by how much at most. Everything is verified as it is read. The
    exit code is 1 if they differ, as with diff(1).

    ```
    sapwood ckpt diff 10 15                       what five steps changed
    sapwood ckpt diff 10 latest --tensors 'encoder.*'
    sapwood ckpt diff ckpts/latest /backup/ckpts/latest
    sapwood ckpt diff 10 15 --json
    ```

    Args:
        a: A step, an id, or latest; a place may stand before it.
        b: The other one.
        place: Where to look.
        tensors: Only tensors whose name fits this pattern.
        json: Write JSON instead of a table.
    """
    from sapwood.cli.output import print_json

    with Content(find_one(a, place)) as left, Content(find_one(b, place)) as right:
        chosen = _chosen(left, right, tensors)
        with progress("comparing", sum(e.nbytes for e in chosen)) as advance:
            rows = [_row(entry, left, right, advance) for entry in chosen]
        names = left.checkpoint.id.folder, right.checkpoint.id.folder
    if json:
        print_json({"a": names[0], "b": names[1], "tensors": [_plain(row) for row in rows]})
    else:
        _show(rows, names)
    return int(any(row.what != "same" for row in rows))


def _chosen(left: Content, right: Content, pattern: str | None) -> list[Entry]:
    more = (e for key, e in right.catalog.by_key.items() if key not in left.catalog.by_key)
    return choose(Catalog((*left.catalog.entries, *more)), pattern)


def _row(entry: Entry, left: Content, right: Content, advance: Callable[[int], None]) -> _Row:
    from sapwood.cli.verbs.ckpt.numbers import Difference, compare

    ours, theirs = (side.catalog.by_key.get(entry.key) for side in (left, right))
    if ours is None or theirs is None:
        return _Row(entry=entry, what="only in B" if ours is None else "only in A")
    if (ours.dtype, ours.shape) != (theirs.dtype, theirs.shape):
        return _Row(entry=ours, what="other kind", other=theirs)
    apart = Difference()
    sides = (_even(side.blocks(entry.key), entry.nbytes) for side in (left, right))
    for one, two in zip(*sides, strict=True):
        apart.add(compare(one, two, entry.dtype))
        advance(len(one))
    return _Row(entry=entry, what="changed" if apart.elements else "same", apart=apart)


def _even(blocks: Iterator[memoryview], nbytes: int) -> Iterator[memoryview]:
    """The same bytes in blocks of one size: two checkpoints may be cut at other places."""
    out = bytearray(min(_BLOCK, nbytes))
    filled = 0
    for block in blocks:
        while block:
            count = min(len(block), len(out) - filled)
            out[filled : filled + count] = block[:count]
            block, filled = block[count:], filled + count
            if filled == len(out):
                yield memoryview(out)
                filled = 0
    if filled:
        yield memoryview(out)[:filled]


def _show(rows: Sequence[_Row], names: tuple[str, str]) -> None:
    from rich.text import Text

    from sapwood.cli.output import console, table

    out = console()
    out.print(f"A is {names[0]}, B is {names[1]}")
    differing = [row for row in rows if row.what != "same"]
    if differing:
        numbers = ("elements", "bytes", "largest")
        made = table("file", "tensor", "", "elements", "bytes", "largest", "", right=numbers)
        for row in differing:
            made.add_row(row.entry.file, Text(row.entry.name), row.what, *_cells(row))
        out.print(made)
    out.print(f"{len(rows) - len(differing)} tensors are the same, {len(differing)} are not")


def _cells(row: _Row) -> tuple[Any, ...]:
    from rich.text import Text

    entry, apart = row.entry, row.apart
    if row.other is not None:
        there = f"{row.other.dtype} {list(row.other.shape)}"
        return "", "", "", Text(f"{entry.dtype} {list(entry.shape)} in A, {there} in B")
    if apart is None:
        return "", size(entry.nbytes), "", ""
    note = f"{apart.not_numbers} not finite" if apart.not_numbers else ""
    return str(apart.elements), size(apart.nbytes), f"{apart.largest:.3g}", note


def _plain(row: _Row) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "file": row.entry.file,
        "name": row.entry.name,
        "what": row.what,
        "dtype": row.entry.dtype,
        "shape": list(row.entry.shape),
    }
    if row.other is not None:
        facts["other"] = {"dtype": row.other.dtype, "shape": list(row.other.shape)}
    if row.apart is not None:
        facts["elements"] = row.apart.elements
        facts["bytes"] = row.apart.nbytes
        facts["largest"] = row.apart.largest
        facts["not_finite"] = row.apart.not_numbers
    return facts
