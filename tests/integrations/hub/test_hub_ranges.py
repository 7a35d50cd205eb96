"""Range headers, and names as ids."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("starlette", reason="pip install 'sapwood[web]'")

from sapwood.integrations.hub.names import hub_id
from sapwood.integrations.hub.ranges import Unsatisfiable, parse_ranges


@pytest.mark.parametrize(
    ("header", "found"),
    [
        (None, None),
        ("bytes=0-0", [(0, 1)]),
        ("bytes=0-99", [(0, 100)]),
        ("bytes=90-", [(90, 100)]),
        ("bytes=90-1000", [(90, 100)]),
        ("bytes=-10", [(90, 100)]),
        ("bytes=-1000", [(0, 100)]),
        ("BYTES = 1-2", [(1, 3)]),
        ("bytes=0-1, 5-6", [(0, 2), (5, 7)]),
        ("bytes=5-6,0-1", [(5, 7), (0, 2)]),
        ("bytes=0-5,3-8", [(0, 9)]),
        ("bytes=0-5,200-300", [(0, 6)]),
        ("bytes=0-1,", [(0, 2)]),
        ("bytes=5-2", None),
        ("bytes=a-b", None),
        ("bytes=-", None),
        ("bytes=1-2;3", None),
        ("bytes=", None),
        ("bytes=1", None),
        ("bytes=--5", None),
        ("bytes=\u0661-2", None),
        ("items=0-1", None),
        ("bytes 0-1", None),
        ("bytes=" + "9" * 30 + "-", None),
    ],
)
def test_which_bytes_are_meant(header: str | None, found: object) -> None:
    assert parse_ranges(header, 100) == found


@pytest.mark.parametrize(
    "header", ["bytes=100-", "bytes=-0", "bytes=200-300", "bytes=0-0" + ",1-1" * 64]
)
def test_ranges_that_cannot_be_given(header: str) -> None:
    with pytest.raises(Unsatisfiable):
        parse_ranges(header, 100)


def test_an_empty_file_has_no_range() -> None:
    with pytest.raises(Unsatisfiable):
        parse_ranges("bytes=0-", 0)


@given(st.text(alphabet="bytes=0123456789-, ", max_size=40), st.integers(0, 50))
def test_no_header_makes_more_bytes_than_there_are(text: str, size: int) -> None:
    try:
        found = parse_ranges(f"bytes={text}", size)
    except Unsatisfiable:
        return
    if found is not None:
        assert all(0 <= start < stop <= size for start, stop in found)
        assert sum(stop - start for start, stop in found) <= size


@pytest.mark.parametrize(
    ("name", "id"),
    [
        ("bert", "bert"),
        ("nt3/run7", "nt3/run7"),
        ("nt3/lr=0.1/run7", "nt3/lr_3D0.1__run7"),
        ("a+b", "a_2Bb"),
        ("a--b", "a-_2Db"),
        ("a---b", "a-_2D_2Db"),
        ("a..b", "a._2Eb"),
        ("a.", "a_2E"),
        ("a-/b.git", "a_2D/b_2Egit"),
        ("x" * 200, "x" * 83 + "_"),
    ],
)
def test_names_as_ids(name: str, id: str) -> None:
    assert hub_id(name)[:84] == id[:84]
    assert all(len(part) <= 96 for part in hub_id(name).split("/"))


_PART = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._+=-]{0,120}", fullmatch=True)


@given(st.lists(_PART, min_size=1, max_size=4).map("/".join))
def test_every_id_is_one_that_clients_take(name: str) -> None:
    validators = pytest.importorskip("huggingface_hub.utils", reason="no huggingface_hub")
    validators.validate_repo_id(hub_id(name))
