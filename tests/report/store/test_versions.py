"""Lists: what a filter lets through, what comes first, and how little is sent of many."""

from __future__ import annotations

import math

import pytest

from sapwood.errors import ConfigError
from sapwood.report.store.plain import line
from sapwood.report.store.versions import (
    Listing,
    Versions,
    list_models,
    list_versions,
    parse_listing,
    wanted,
)
from sapwood.repository.base import ModelRecord
from sapwood.store import Repository


def record(n: int, name: str = "m", **more: object) -> ModelRecord:
    given = {"version": str(n), "created": 1e9 + n, "nbytes": n, "tensors": 1, **more}
    return ModelRecord(
        id=n, name=name, removed=None, parent=None, parent_name=None, note={}, **given,
    )  # type: ignore[arg-type]  # fmt: skip


def refs(records: list[ModelRecord], words: str = "", **more: object) -> list[str]:
    found = list_versions(records, Listing(words=words, **more))  # type: ignore[arg-type]
    return [row["ref"] for row in found["rows"]]


SOME = [
    record(1, "nt3/run7", tags=("best",), metrics={"acc": 0.5}),
    record(2, "nt3/run7", metrics={"acc": 0.9, "loss": math.inf}),
    record(3, "nt3/run70", tags=("<img src=x onerror=alert(1)>",)),
    record(4, "Other", metrics={"acc": -1.0}),
]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("", [4, 3, 2, 1]),
        ("run7", [3, 2, 1]),
        ("RUN7@2", [2]),
        ("name:nt3/run7", [2, 1]),
        ("tag:best", [1]),
        ("tag:bes", []),
        ("bes", [1]),
        ("<img", [3]),
        ("acc>0.5", [2]),
        ("acc>=0.5 run7", [2, 1]),
        ("acc<0", [4]),
        ("loss>1e300", [2]),
        ("none<1", []),
    ],
)
def test_all_words_of_a_filter_must_fit(words: str, expected: list[int]) -> None:
    assert [int(ref.partition("@")[2]) for ref in refs(SOME, words)] == expected


def test_a_filter_that_compares_with_no_number_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"'high' is no number"):
        wanted("acc>high")


def test_versions_without_the_metric_come_last_in_either_order() -> None:
    up = refs(SOME, sort="metric:acc", descending=False)
    down = refs(SOME, sort="metric:acc")
    assert up == ["Other@4", "nt3/run7@1", "nt3/run7@2", "nt3/run70@3"]
    assert down == ["nt3/run7@2", "nt3/run7@1", "Other@4", "nt3/run70@3"]


def test_each_model_is_listed_with_its_latest_version() -> None:
    found = list_models(SOME, Listing(sort="count"))
    assert [(row["ref"], row["count"]) for row in found["rows"]] == [
        ("nt3/run7@2", 2), ("Other@4", 1), ("nt3/run70@3", 1),
    ]  # fmt: skip
    assert found["all"] == 3


def test_the_metric_that_is_sorted_by_is_always_shown() -> None:
    many = {f"m{n}": float(n) for n in range(50)}
    found = list_versions([record(1, metrics={**many, "zz": 1.0})], Listing(sort="metric:zz"))
    assert len(found["columns"]) == 4
    assert "zz" in found["columns"]


def test_little_is_sent_of_many() -> None:
    tags = tuple(f"{'t' * 90}{n}" for n in range(1000))
    metrics = {"k" * 5000: 1.0, **{f"key{n}": 1.0 for n in range(200)}}
    records = [record(n, "n" * 200, tags=tags, metrics=metrics) for n in range(1, 501)]
    query = {"limit": "200"}
    for listed in (list_versions, list_models):
        assert len(line(listed(records, parse_listing(query)))) < 600_000


@pytest.mark.parametrize(
    "query",
    [
        {"sort": "id"}, {"offset": "-1"}, {"offset": "1e3"}, {"offset": "٣"}, {"limit": "0"},
        {"limit": "201"}, {"limit": ""}, {"offset": "9" * 30},
    ],
)  # fmt: skip
def test_what_is_not_well_formed_is_refused(query: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="expected"):
        parse_listing(query)


def test_ten_thousand_versions_are_read_once_for_many_requests(
    repo: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    many = [record(n) for n in range(10_000)]
    monkeypatch.setattr(repo, "models", lambda: calls.append(1) or many)
    versions = Versions(repo)
    for _ in range(3):
        assert len(versions.all()) == 10_000
    assert len(calls) == 1
    versions.forget()
    versions.all()
    assert len(calls) == 2
