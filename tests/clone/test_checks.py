from __future__ import annotations

import pytest

from sapwood.clone.checks import pack_digests, size_of_digests, unpack_digests
from sapwood.tiers.digest import DEFAULT_ALGORITHM, digest


@pytest.mark.parametrize("algorithm", ["blake2b", DEFAULT_ALGORITHM])
@pytest.mark.parametrize("count", [0, 1, 5])
def test_checksums_arrive_as_they_were_in_the_bytes_that_were_expected(
    algorithm: str, count: int
) -> None:
    marks = [digest(bytes([n]), algorithm) for n in range(count)]
    packed = pack_digests(marks)
    assert packed.numel() == size_of_digests(count, algorithm)
    assert unpack_digests(packed, algorithm) == marks
