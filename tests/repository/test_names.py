"""Names, versions and tags of models."""

import pytest

from sapwood.errors import BadName
from sapwood.repository.names import Reference, nearest, next_version, parse


@pytest.mark.parametrize(
    ("text", "name", "version"),
    [
        ("nt3", "nt3", None),
        ("nt3/run7@step-500", "nt3/run7", "step-500"),
        ("a/b.c/d_e@1.0+cpu", "a/b.c/d_e", "1.0+cpu"),
        ("meta-llama/Llama-3@x=1", "meta-llama/Llama-3", "x=1"),
    ],
)
def test_a_reference_is_read_and_written(text: str, name: str, version: str | None) -> None:
    assert parse(text) == Reference(name, version)
    assert str(parse(text)) == text


@pytest.mark.parametrize(
    "text",
    [
        "", "@", "a@", "@1", "a/", "/a", "a//b", "..", "a/..", "../a", "a/.b", ".a", "a b", "a\nb",
        "a\x00",
        "a@..", "a@b/c", "a@b@c", "ä", "a" * 201, "a@" + "1" * 101, "-a", "~", "a:b", "a\\b",
    ],
)  # fmt: skip
def test_what_is_no_reference_is_refused(text: str) -> None:
    with pytest.raises(BadName):
        parse(text)


@pytest.mark.parametrize("value", [None, 7, b"a", ["a"]])
def test_what_is_no_text_is_refused(value: object) -> None:
    with pytest.raises(BadName, match="name@version"):
        parse(value)  # type: ignore[arg-type]


def test_versions_count_up() -> None:
    assert next_version([]) == "1"
    assert next_version(["1", "10", "9", "step-99", "2.5", "٣"]) == "11"


def test_what_is_alike_is_named() -> None:
    assert nearest("nt3/run", ["nt3/run7", "other"]) == "; did you mean 'nt3/run7'?"
    assert nearest("zzz", ["nt3/run7"]) == ""
