"""Erasure codes: any k of k+m fragments give the bytes back, at every size."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sapwood.errors import CheckpointError, ConfigError
from sapwood.tiers import codec as codecs
from sapwood.tiers.codec import PART_BYTES, Codec, Scheme, best_code

SCHEMES = ("1+1", "2+1", "3+1", "1+2", "2+2", "4+2", "5+3")
CODES = [(scheme, best_code(Scheme.parse(scheme))) for scheme in SCHEMES]
CODES += [
    ("4+2", "isa_l_rs_vand_inv"),
    ("4+2", "liberasurecode_rs_vand"),
    ("2+1", "isa_l_rs_cauchy"),
]


def make(scheme: str, code: str = "", stripes: int = 2) -> Codec:
    k = Scheme.parse(scheme).k
    return Codec(Scheme.parse(scheme), code, block=stripes * k * PART_BYTES)


def encode(codec: Codec, data: np.ndarray) -> list[np.ndarray]:
    size = codec.fragment_bytes(len(data))
    out = [np.full(size, 0xAA, np.uint8) for _ in range(codec.scheme.total)]
    codec.encode(data, out)
    return out


def decode(codec: Codec, fragments: dict[int, np.ndarray], nbytes: int) -> np.ndarray:
    out = np.full(nbytes, 0x55, np.uint8)
    codec.decode(fragments, out)
    return out


@pytest.mark.parametrize(("scheme", "code"), CODES)
def test_any_k_fragments_are_enough(scheme: str, code: str) -> None:
    codec = make(scheme, code)
    k, total = codec.scheme.k, codec.scheme.total
    for nbytes in (1, 5, k, codec.stripe - 1, codec.stripe + 1, codec.block):
        data = np.random.default_rng(nbytes).integers(0, 256, nbytes, np.uint8)
        fragments = encode(codec, data)
        for kept in combinations(range(total), k):
            found = decode(codec, {n: fragments[n] for n in kept}, nbytes)
            assert np.array_equal(found, data), kept


@settings(max_examples=60)
@given(
    scheme=st.sampled_from(SCHEMES),
    stripes=st.integers(0, 2),
    rest=st.one_of(st.integers(-3, 3), st.integers(0, 5000)),
    seed=st.integers(0, 2**32 - 1),
    chance=st.randoms(use_true_random=False),
)
def test_sizes_at_and_beside_the_borders(scheme, stripes, rest, seed, chance) -> None:
    codec = make(scheme, stripes=3)
    nbytes = max(stripes * codec.stripe + rest, 0)
    data = np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)
    fragments = encode(codec, data)
    kept = chance.sample(range(codec.scheme.total), codec.scheme.k)
    assert np.array_equal(decode(codec, {n: fragments[n] for n in kept}, nbytes), data)


def test_fragments_of_blocks_lie_one_after_the_other() -> None:
    codec = make("4+2")
    nbytes = 2 * codec.block + 777
    blocks = codec.blocks(nbytes)
    assert blocks[0] == (0, codec.block)
    assert blocks[-1] == (2 * codec.block, nbytes)
    sizes = [codec.fragment_bytes(stop - start) for start, stop in blocks]
    assert sum(sizes) == codec.fragment_bytes(nbytes)
    assert sizes[0] == codec.block_fragment
    assert codec.blocks(0) == []
    assert codec.fragment_bytes(0) == 0


def test_data_in_memory_that_cannot_be_written_is_taken() -> None:
    data = np.frombuffer(bytes(range(256)) * 9, np.uint8)
    codec = make("4+2")
    fragments = encode(codec, data)
    assert np.array_equal(decode(codec, dict(enumerate(fragments[2:], 2)), len(data)), data)


def test_too_few_fragments_are_refused() -> None:
    codec = make("4+2")
    fragments = encode(codec, np.zeros(100, np.uint8))
    with pytest.raises(CheckpointError, match="3 fragments of a 4"):
        decode(codec, dict(enumerate(fragments[:3])), 100)


def test_schemes_that_are_none() -> None:
    for text in ("", "4", "4+", "+2", "4-2", "a+b", "4+2+1", " 4+2", "0+1", "4+0"):
        with pytest.raises(ConfigError, match="expected"):
            Scheme.parse(text)
    with pytest.raises(ConfigError, match="at most 32"):
        Scheme.parse("31+2")


def test_codes_that_are_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="not available"):
        Codec(Scheme(4, 2), "jerasure_rs_cauchy")
    with pytest.raises(ConfigError, match="one parity"):
        Codec(Scheme(4, 2), "xor")
    monkeypatch.setattr(codecs, "_BACKENDS", ("isa_l_of_the_future", "liberasurecode_rs_vand"))
    assert best_code(Scheme(4, 2)) == "liberasurecode_rs_vand"
    monkeypatch.setitem(__import__("sys").modules, "pyeclib", None)
    with pytest.raises(ConfigError, match=r"sapwood\[parity\]"):
        Codec(Scheme(4, 2))
    assert Codec(Scheme(4, 1)).code == "xor"
