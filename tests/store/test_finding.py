"""Finding versions: what an expression means, and that nothing in it is ever run."""

import time
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sapwood.errors import ConfigError
from sapwood.store import Repository
from sapwood.store import open as open_repository
from sapwood.store.finding import parse_expression, parse_size


@pytest.fixture(scope="module")
def repo() -> Iterator[Repository]:
    with open_repository("memory:") as repository:
        for number in range(5):
            repository.save(
                {"a": torch.zeros(1000 * (number + 1)), "b": torch.ones(number)},
                f"nt3/run{number}@v{number}",
                metrics={"val_acc": number / 10, "val loss": 1.0 - number, "size": 7.0},
                tags=["best"] if number == 3 else ["old", "seen"],
            )
        repository.save({"a": torch.zeros(3)}, "other@x=1", metrics={"epoch": float("inf")})
        yield repository


@pytest.mark.parametrize(
    ("expression", "found"),
    [
        ("val_acc > 0.2", "34"),
        ("val_acc>0.2 and size<20kB", "3"),
        ("val_acc = 0.1 or val_acc == .3", "13"),
        ("val_acc >= 1e-1 and not (tag = best or val_acc > 0.3)", "12"),
        ("not val_acc > 0.1", "01x"),
        ("val_acc != 0.3", "0124"),
        ("has val_acc and not tag=old", "3"),
        ("has 'val loss'", "01234"),
        ("has epoch", "x"),
        ("'val loss' < 0", "234"),
        ('"val loss" < -2.5', "4"),
        ("epoch = inf", "x"),
        ("'size' = 7 and val_acc < 0.2", "01"),
        ("metric.size = 7 and val_acc < 0.2", "01"),
        ("name = other", "x"),
        ("name != other", "01234"),
        ("name ~ 'nt3/run[12]'", "12"),
        ("name ~ nt3/*", "01234"),
        ("version = 'x=1'", "x"),
        ("version ~ v*", "01234"),
        ("tag = seen", "0124"),
        ("tag != seen", "3x"),
        ("tag ~ b*", "3"),
        ("size = 4000", "0"),
        ("size > 16KiB", "4"),
        ("tensors = 2", "01234"),
        ("age < 1h", "01234x"),
        ("age >= 7d", ""),
        ("created > 2020-01-01 and created < 2020-01-01T10:30", ""),
        ("created > 2020-01-01T00:00:00+02:00", "01234x"),
        ("NOT tag = old AND NOT name = other", "3"),
        ("((val_acc > 0.3))", "4"),
        ("not not val_acc > 0.3", "4"),
    ],
)
def test_what_fits(expression: str, found: str, repo: Repository) -> None:
    records = repo.find(expression)
    assert "".join(record.version.lstrip("v")[0] for record in records) == found


def test_the_best_come_first(repo: Repository) -> None:
    found = repo.find("name ~ '*'", by="val_acc")
    assert [r.version for r in found] == ["v4", "v3", "v2", "v1", "v0", "x=1"]
    assert repo.find("has val_acc", by="val_acc", lower=True)[0].version == "v0"
    with pytest.raises(ConfigError, match="no version has the metric 'val_ac'"):
        repo.find("name ~ '*'", by="val_ac")


@pytest.mark.parametrize(
    ("expression", "said"),
    [
        ("", "ends too early"),
        ("val_ac > 1", "no version has the metric 'val_ac'; did you mean 'val_acc'"),
        ("has nothing", r"no version has the metric 'nothing' \(there are epoch, size, val loss"),
        ("val_acc", "ends too early: expected an operator"),
        ("val_acc >", "ends too early: expected a value"),
        ("val_acc > high", "'high' is no number"),
        ("val_acc > nan", "'nan' is no number"),
        ("val_acc ~ 0.9", "~ is for patterns"),
        ("val_acc > 0.1 size < 3", "at 'size', character 15: expected 'and', 'or' or the end"),
        ("val_acc > 0.1 adn size < 3", "did you mean 'and'"),
        ("(val_acc > 1", "expected '\\)'"),
        ("val_acc > 1)", "expected 'and', 'or' or the end"),
        ("and val_acc > 1", "goes in quotes"),
        ("'' > 1", "expected a metric"),
        ("'val_acc > 1", "a quote that is not closed"),
        ("name < x", "expected =, != or ~ after name"),
        ("size < big", "'big' is no size"),
        ("size < 3iB", "is no size"),
        ("age < soon", "age is 'soon'"),
        ("age = 3h", "is never equal to anything"),
        ("created > yesterday", "is no date"),
        ("val_acc > 1 ! 2", "'!' at character 13"),
        ("(" * 100 + "size < 1" + ")" * 100, "nested more than 50"),
        ("not " * 100 + "size < 1", "nested more than 50"),
        ("size < 1 or " * 1000, "expected at most 4000"),
        ("__import__('os').system('true') > 1", "expected an operator"),
    ],
)
def test_what_cannot_be_read_is_said(expression: str, said: str, repo: Repository) -> None:
    with pytest.raises(ConfigError, match=said):
        repo.find(expression)


def test_an_empty_repository_has_nothing_and_no_complaint() -> None:
    with open_repository("memory:") as empty:
        assert empty.find("val_acc > 0.9") == []
        with pytest.raises(ConfigError):
            empty.find("val_acc >")


@given(st.text(alphabet="ab01 .<>=!~()'\"andornothas/*-\n", max_size=60))
@settings(max_examples=300, deadline=None)
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        parse_expression(text)
    except ConfigError as error:
        assert str(error)  # noqa: PT017 - either is right, and nothing else


@pytest.mark.parametrize(
    ("text", "size"),
    [("0", 0), ("12", 12), ("1kB", 1000), ("1.5 GB", 15 * 10**8), ("2GiB", 2**31), ("3m", 3e6)],
)
def test_sizes(text: str, size: float) -> None:
    assert parse_size(text) == size


def test_time_is_that_of_the_search(repo: Repository) -> None:
    term = parse_expression("age > 1h")
    record = repo.models()[0]
    assert not term.fits(record)
    assert time.time() - record.created < 3600
