"""Shards: every byte once, balanced, and safetensors that the safetensors library reads."""

from __future__ import annotations

import json
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sapwood.errors import CheckpointError
from sapwood.state.catalog import DTYPE_BYTES, Catalog, Entry
from sapwood.state.shards import ALIGNMENT, LARGE_PIECE, PAGE, SMALL_SLICE, plan_shards


def entry(name: str, *shape: int, file: str = "model", dtype: str = "F32", world: int = 1) -> Entry:
    return Entry(file=file, name=name, dtype=dtype, shape=shape, holders=tuple(range(world)))


@st.composite
def catalogs(draw: st.DrawFn) -> tuple[Catalog, int]:
    world = draw(st.integers(1, 7))
    sizes = st.one_of(st.integers(0, 300), st.integers(SMALL_SLICE // 8, LARGE_PIECE * 2))
    rows = draw(st.lists(st.tuples(sizes, st.sampled_from(sorted(DTYPE_BYTES))), max_size=25))
    holders = st.sets(st.integers(0, world - 1), min_size=1).map(lambda s: tuple(sorted(s)))
    return (
        Catalog(
            tuple(
                Entry(
                    file=draw(st.sampled_from(["model", "optimizer"])),
                    name=f"t{n}",
                    dtype=dtype,
                    shape=(size,),
                    holders=draw(holders),
                )
                for n, (size, dtype) in enumerate(rows)
            )
        ),
        world,
    )


@given(catalogs())
def test_every_byte_is_in_one_shard_of_a_holder(case: tuple[Catalog, int]) -> None:
    catalog, world = case
    plan = plan_shards(catalog, world)
    covered: dict[tuple[str, str], list[tuple[int, int]]] = {e.key: [] for e in catalog.entries}
    for shard in plan.shards:
        end = 0
        for piece in shard.pieces:
            assert shard.rank in catalog.by_key[piece.key].holders
            assert piece.at >= end
            if piece.nbytes >= LARGE_PIECE:
                offset = catalog.layouts[piece.file].start(piece.name) + piece.start
                assert (piece.at - offset) % PAGE == 0
            else:
                assert piece.at % ALIGNMENT == 0
            end = piece.at + piece.nbytes
            covered[piece.key].append((piece.start, piece.stop))
        assert shard.nbytes >= end
    for key, parts in covered.items():
        at = 0
        for start, stop in sorted(parts):
            assert start == at
            at = stop
        assert at == catalog.by_key[key].nbytes


def test_large_tensors_are_sliced_and_small_ones_balanced() -> None:
    world = 4
    large = entry("large", SMALL_SLICE * world, world=world)
    small = [entry(f"small{n}", 1000, world=world) for n in range(40)]
    plan = plan_shards(Catalog((large, *small)), world)
    sizes = [sum(p.nbytes for p in shard.pieces) for shard in plan.shards]
    assert max(sizes) - min(sizes) <= 4000
    assert all("large" in {p.name for p in shard.pieces} for shard in plan.shards)
    assert sum(len(shard.pieces) for shard in plan.shards) == world + len(small)


def test_slices_of_a_large_tensor_share_no_page_of_its_file() -> None:
    world = 3
    odd, large = entry("a", 7, world=world), entry("b", LARGE_PIECE, world=world)
    catalog = Catalog((odd, large))
    begin = catalog.layouts["model"].start("b")
    for shard in plan_shards(catalog, world).shards[1:]:
        assert (begin + shard.by_key["model", "b"].start) % PAGE == 0


@given(catalogs())
def test_a_layout_is_a_safetensors_header(case: tuple[Catalog, int]) -> None:
    catalog, _ = case
    for layout in catalog.layouts.values():
        (length,) = struct.unpack("<Q", layout.header[:8])
        assert len(layout.header) == length + 8
        table = json.loads(layout.header[8:])
        table.pop("__metadata__")
        spans = sorted(tuple(row["data_offsets"]) for row in table.values())
        at = 0
        for start, stop in spans:
            assert start == at, "safetensors allows no holes"
            at = stop
        assert layout.size == len(layout.header) + at
        for name, row in table.items():
            width = DTYPE_BYTES[row["dtype"]]
            assert layout.start(name) % width == 0
            assert layout.start(name) == len(layout.header) + row["data_offsets"][0]


@given(catalogs())
def test_a_catalog_survives_json(case: tuple[Catalog, int]) -> None:
    catalog, _ = case
    assert Catalog.from_json(json.loads(json.dumps(catalog.to_json()))) == catalog


@pytest.mark.parametrize(
    "rows",
    [
        None,
        [["model", "a"]],
        [["model", "a", "F7", [1], [0]]],
        [["model", "a", "F32", [-1], [0]]],
        [["model", "a", "F32", [1], [0]], ["model", "a", "F32", [1], [0]]],
    ],
)
def test_a_damaged_catalog_is_refused(rows: object) -> None:
    with pytest.raises(CheckpointError):
        Catalog.from_json(rows)
