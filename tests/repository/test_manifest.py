"""Manifests as bytes: what comes back, and what damage does."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sapwood.errors import Damaged
from sapwood.repository.manifest import DTYPES, Manifest, nbytes_of

SAMPLE = Manifest(
    dtypes=("float32", "bfloat16", "bool"),
    shapes=((3, 4), (), (0, 7)),
    blobs=(17, 2**40, -1),
    names=(("conv.weight", 0), ("tied", 0), ("größe", 1), ("mask", 2)),
    structure={"$": "ordered", "v": [1, None, "x"]},
    graph=b"\x00\x01graph",
)


def test_what_was_encoded_comes_back() -> None:
    found = Manifest.decode(SAMPLE.encode())
    assert found == SAMPLE
    assert found.nbytes == 48 + 2 + 0
    assert found.row(1).shape == ()
    assert found.by_name["tied"] == 0


def test_nothing_at_all_comes_back() -> None:
    empty = Manifest((), (), (), (), None)
    assert Manifest.decode(empty.encode()) == empty


def test_sizes_are_those_of_torch() -> None:
    for name in DTYPES:
        dtype = getattr(torch, name)
        assert nbytes_of(name, (3, 5)) == 15 * dtype.itemsize, name


@given(st.integers(0, len(SAMPLE.encode()) - 1), st.integers(1, 255))
@settings(max_examples=200, deadline=None)
def test_a_flipped_byte_is_noticed(at: int, flip: int) -> None:
    content = bytearray(SAMPLE.encode())
    content[at] ^= flip
    with pytest.raises(Damaged):
        Manifest.decode(bytes(content))


@given(st.integers(0, len(SAMPLE.encode()) - 1))
@settings(max_examples=100, deadline=None)
def test_a_truncated_manifest_is_noticed(length: int) -> None:
    with pytest.raises(Damaged):
        Manifest.decode(SAMPLE.encode()[:length])


@given(st.binary(max_size=400))
@settings(max_examples=200, deadline=None)
def test_other_bytes_are_no_manifest(content: bytes) -> None:
    with pytest.raises(Damaged):
        Manifest.decode(content)


@given(st.binary(max_size=400))
@settings(max_examples=300, deadline=None)
def test_bytes_with_a_right_checksum_are_still_looked_at(content: bytes) -> None:
    """Somebody who can write a checksum can write anything behind a right head."""
    import struct
    import zlib

    head = SAMPLE.encode()[:8]
    body = head + content
    sealed = body + struct.pack("<I", zlib.crc32(body))
    try:
        found = Manifest.decode(sealed)
    except Damaged:
        return
    assert all(0 <= number < len(found.dtypes) for _, number in found.names)


FILES = Manifest(
    dtypes=("float32", "uint8"),
    shapes=((3,), (7,)),
    blobs=(1, 2),
    names=(("a", 0),),
    structure={"a": 1},
    files=(("config.json", 1),),
)


def test_files_come_back() -> None:
    assert Manifest.decode(FILES.encode()) == FILES


@pytest.mark.parametrize(
    "files",
    [
        (("../config.json", 1),),
        (("config.json", 0),),
        (("config.json", 2),),
        (("config.json", -1),),
        (("config.json", "1"),),
    ],
)
def test_files_that_are_none_are_refused(files: tuple[tuple[str, int], ...]) -> None:
    with pytest.raises(Damaged):
        Manifest.decode(replace(FILES, files=files).encode())
    wide = replace(FILES, dtypes=("float32", "int16"))
    with pytest.raises(Damaged, match="no run of bytes"):
        Manifest.decode(wide.encode())
