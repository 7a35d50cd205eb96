"""``sapwood ckpt inspect``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from sapwood.cli.verbs.ckpt.content import choose
from sapwood.cli.verbs.ckpt.places import DEFAULT_PLACE
from sapwood.cli.verbs.ckpt.survey import Checkpoint, Copy, find_one
from sapwood.cli.words import size
from sapwood.errors import CheckpointError
from sapwood.state.catalog import Entry
from sapwood.tiers.metrics import plain_metrics
from sapwood.tiers.record import ShardRecord

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["inspect"]


def inspect(
    checkpoint: str = "latest",
    /,
    *,
    place: str = DEFAULT_PLACE,
    tensors: str | None = None,
    json: Annotated[bool, Parameter(negative="")] = False,
) -> None:
    """Show what a checkpoint holds: its tensors, who saved which share, and what else was kept.

    ```
    sapwood ckpt inspect                           the newest whole one under ckpts/
    sapwood ckpt inspect 15 --tensors '*.weight'   some of its tensors
    sapwood ckpt inspect /data/ckpts/latest
    sapwood ckpt inspect 15 --json
    ```

    Args:
        checkpoint: A step, an id, or latest; a place may stand before it.
        place: Where to look.
        tensors: Only tensors whose name fits this pattern, such as 'layers.0.*'.
        json: Write JSON instead of tables.
    """
    from sapwood.cli.output import print_json

    found = find_one(checkpoint, place)
    record = found.any_record
    if record is None:
        why = "; ".join(c.problem for c in found.damaged if c.problem) or "it is only a draft"
        raise CheckpointError(f"checkpoint {found.id} has no record that can be read: {why}")
    chosen = choose(record.catalog, tensors)
    if json:
        print_json(_plain(found, record, chosen))
    else:
        _show(found, record, chosen)


def _show(found: Checkpoint, record: ShardRecord, chosen: Sequence[Entry]) -> None:
    from rich.text import Text

    from sapwood.cli.output import console

    out = console()
    facts = f"{found.state}, {size(found.nbytes)} in {record.world} shards"
    out.print(f"checkpoint {found.id}: {facts}", markup=False)
    lineage = found.lineage
    if lineage is not None:
        whence = "from scratch" if lineage.parent is None else f"restored from {lineage.parent}"
        word = f"run {lineage.run}, attempt {found.id.attempt}, {whence}; branch: {found.branch}"
        out.print(word, markup=False, soft_wrap=True)
    for part in (_tensor_table(chosen), _file_table(record), _shard_table(found)):
        out.print()
        out.print(part)
    out.print()
    for name, value in _extras(found).items():
        out.print(Text(f"{name}: {_words(value)}"))


def _tensor_table(chosen: Sequence[Entry]) -> Table:
    from rich.text import Text

    from sapwood.cli.output import table

    made = table("file", "tensor", "dtype", "shape", "size", right=("size",))
    for entry in chosen:
        shape = Text(f"[{', '.join(map(str, entry.shape))}]")
        made.add_row(entry.file, Text(entry.name), entry.dtype, shape, size(entry.nbytes))
    return made


def _file_table(record: ShardRecord) -> Table:
    from sapwood.cli.output import table

    made = table("file", "tensors", "size", right=("tensors", "size"))
    for file, (count, nbytes) in _totals(record).items():
        made.add_row(f"{file}.safetensors", str(count), size(nbytes))
    return made


def _shard_table(found: Checkpoint) -> Table:
    from rich.text import Text

    from sapwood.cli.output import table

    numbers = ("shard", "size", "share", "pieces")
    made = table(*numbers, "where", right=numbers)
    for row in _shards(found):
        cells = (str(row["rank"]), size(row["bytes"]), f"{row['share']:.0%}", str(row["pieces"]))
        made.add_row(*cells, Text(", ".join(row["places"])))
    return made


def _totals(record: ShardRecord) -> dict[str, tuple[int, int]]:
    rows: dict[str, tuple[int, int]] = {}
    for entry in record.catalog.entries:
        count, nbytes = rows.get(entry.file, (0, 0))
        rows[entry.file] = count + 1, nbytes + entry.nbytes
    return rows


def _shards(found: Checkpoint) -> list[dict[str, Any]]:
    """Who holds what; equal shares are what the plan aims at."""
    held = {rank: sum(p.nbytes for p in r.shard.pieces) for rank, r in found.records.items()}
    total = sum(held.values()) or 1
    return [
        {
            "rank": rank,
            "bytes": held[rank],
            "share": held[rank] / total,
            "pieces": len(record.shard.pieces),
            "places": [_where(c) for c in found.copies if c.rank == rank],
        }
        for rank, record in sorted(found.records.items())
    ]


def _where(copy: Copy) -> str:
    return copy.place.label + (f" ({copy.fragments})" if copy.fragments else "")


def _extras(found: Checkpoint) -> dict[str, Any]:
    """What was kept beside tensors, without the bytes of it."""
    record = found.any_record
    assert record is not None
    extras = record.extras
    groups: list[Mapping[str, Any]] = extras.get("groups", [])
    return {
        "step": extras.get("step"),
        "learning rates": [_number(group.get("lr")) for group in groups],
        "optimizer settings": [
            {k: v for k, v in g.items() if k != "lr" and not isinstance(v, (dict, list))}
            for g in groups
        ],
        "shared state": sorted(extras.get("shared", {})),
        "each rank's own state": sorted(extras.get("own", {})),
        "random states": {
            f"rank {rank}": sorted(r.extras.get("random", {}))
            for rank, r in sorted(found.records.items())
        },
        "bytes of large state": {
            f"rank {rank}": r.extras_bytes
            for rank, r in sorted(found.records.items())
            if r.extras_bytes
        },
        "metrics": plain_metrics(found.metrics),
        "checksums": record.algorithm,
    }


def _number(value: Any) -> Any:
    """A learning rate, also where it was a tensor or a number of numpy's."""
    if not isinstance(value, dict):
        return value
    from sapwood.state.plain import from_plain

    try:
        return float(from_plain(value))
    except (CheckpointError, TypeError, ValueError):
        return None


def _words(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{k} {_words(v)}" for k, v in value.items() if v is not None) or "none"
    if isinstance(value, list):
        return "; ".join(_words(v) for v in value) or "none"
    return str(value)


def _plain(found: Checkpoint, record: ShardRecord, chosen: Sequence[Entry]) -> dict[str, Any]:
    return {
        "id": found.id.folder,
        "state": found.state,
        "branch": found.branch or None,
        "lineage": None if found.lineage is None else found.lineage.to_json(),
        "bytes": found.nbytes,
        "world": record.world,
        "created": record.created,
        "files": {f: {"tensors": n, "bytes": b} for f, (n, b) in _totals(record).items()},
        "tensors": [
            {
                "file": e.file,
                "name": e.name,
                "dtype": e.dtype,
                "shape": list(e.shape),
                "bytes": e.nbytes,
            }
            for e in chosen
        ],
        "shards": _shards(found),
        "extras": {name.replace(" ", "_"): value for name, value in _extras(found).items()},
    }
