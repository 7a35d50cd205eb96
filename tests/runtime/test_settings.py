"""Argument over environment over file over default, and a value of the wrong kind is refused."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy
import pytest

from sapwood.errors import ConfigError
from sapwood.runtime import settings
from sapwood.runtime.settings import UNSET, resolve


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    rate: float = 1.0
    limit: float | None = None
    count: int = 3
    loud: bool = False
    fused: bool | None = None
    mode: Literal["slow", "fast"] = "slow"
    level: Literal["low", "high"] | None = None
    place: str | Path = "here"
    home: Path = Path("home")


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("SAPWOOD_CONFIG", raising=False)
    return tmp_path / "sapwood.toml"  # tests run in their own folder


def value(name: str, **arguments: Any) -> Any:
    return getattr(resolve(Engine, "engine", arguments).value, name)


def test_the_nearest_source_wins_and_is_remembered(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file.write_text('[engine]\nrate = 2\ncount = 4\nmode = "fast"\n[clone]\nx = 1\n')
    monkeypatch.setenv("SAPWOOD_RATE", "3.5")
    monkeypatch.setenv("SAPWOOD_COUNT", "5")
    resolved = resolve(Engine, "engine", {"rate": 4.5, "count": UNSET})
    assert resolved.value == Engine(rate=4.5, count=5, mode="fast")
    assert resolved.origins["rate"] == "argument"
    assert resolved.origins["count"] == "environment SAPWOOD_COUNT"
    assert resolved.origins["mode"] == "file sapwood.toml"
    assert resolved.origins["loud"] == "default"
    assert resolved.origins.keys() == set(Engine.__slots__)  # type: ignore[attr-defined]


def test_the_file_can_be_named(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    named = tmp_path / "other.toml"
    named.write_text("[engine]\ncount = 9\n")
    file.write_text("[engine]\ncount = 4\n")
    monkeypatch.setenv("SAPWOOD_CONFIG", str(named))
    resolved = resolve(Engine, "engine", {})
    assert resolved.value.count == 9
    assert resolved.origins["count"] == f"file {named}"


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("rate", "1e-3", 1e-3),
        ("limit", "none", None),
        ("limit", "", None),
        ("limit", "2", 2.0),
        ("count", "7", 7),
        ("loud", "Yes", True),
        ("loud", "off", False),
        ("fused", "None", None),
        ("fused", "1", True),
        ("mode", "fast", "fast"),
        ("level", "high", "high"),
        ("level", "none", None),
        ("place", "there", "there"),
        ("home", "there", Path("there")),
    ],
)
def test_the_environment_is_read_by_the_type_asked_for(
    file: Path, monkeypatch: pytest.MonkeyPatch, name: str, text: str, expected: Any
) -> None:
    monkeypatch.setenv(f"SAPWOOD_{name.upper()}", text)
    found = value(name)
    assert found == expected
    assert type(found) is type(expected)


@pytest.mark.parametrize(
    ("name", "text", "wanted"),
    [
        ("rate", "quick", "a number"),
        ("rate", "true", "a number"),
        ("limit", "quick", "a number or none"),
        ("count", "1.5", "a whole number"),
        ("count", "", "a whole number"),
        ("loud", "maybe", "true or false"),
        ("mode", "medium", "one of 'slow', 'fast'"),
        ("level", "medium", "one of 'low', 'high' or none"),
    ],
)
def test_the_environment_is_named_when_it_is_wrong(
    file: Path, monkeypatch: pytest.MonkeyPatch, name: str, text: str, wanted: str
) -> None:
    monkeypatch.setenv(f"SAPWOOD_{name.upper()}", text)
    message = f"SAPWOOD_{name.upper()} is {text!r}, expected {wanted}"
    with pytest.raises(ConfigError, match=re.escape(message)):
        value(name)


WRONG: list[tuple[str, str, Any, str]] = [
    ("rate", '"2"', "2", "a number"),
    ("rate", "true", True, "a number"),
    ("limit", '"none"', "none", "a number or none"),
    ("count", "1.5", 1.5, "a whole number"),
    ("count", "true", True, "a whole number"),
    ("loud", "1", 1, "true or false"),
    ("loud", '"yes"', "yes", "true or false"),
    ("mode", '"medium"', "medium", "one of 'slow', 'fast'"),
    ("mode", "1", 1, "one of 'slow', 'fast'"),
    ("place", "3", 3, "text or a path"),
    ("rate", "[1.0]", [1.0], "a number"),
]


@pytest.mark.parametrize(("name", "toml", "given", "wanted"), WRONG)
def test_files_and_arguments_are_named_when_they_are_wrong(
    file: Path, name: str, toml: str, given: Any, wanted: str
) -> None:
    file.write_text(f"[engine]\n{name} = {toml}\n")
    told = f"{name} in [engine] of sapwood.toml is {given!r}, expected {wanted}"
    with pytest.raises(ConfigError, match=re.escape(told)):
        value(name)
    told = f"the argument {name} is {given!r}, expected {wanted}"
    with pytest.raises(ConfigError, match=re.escape(told)):
        value(name, **{name: given})


def test_whole_numbers_and_numbers_of_numpy_are_numbers(file: Path) -> None:
    file.write_text("[engine]\nrate = 2\nlimit = 3\n")
    found = resolve(Engine, "engine", {"count": numpy.int64(4), "limit": numpy.float32(0.5)}).value
    assert [repr(one) for one in (found.rate, found.limit, found.count)] == ["2.0", "0.5", "4"]
    assert value("place", place=Path("x")) == Path("x")
    assert value("fused", fused=None) is None


def test_unknown_names_are_told_with_the_known_ones(file: Path) -> None:
    with pytest.raises(ConfigError, match=r"unknown setting 'rat'; known: count, .*rate"):
        resolve(Engine, "engine", {"rat": 1})
    file.write_text("[engine]\nrat = 1\n")
    with pytest.raises(ConfigError, match=r"sapwood\.toml sets unknown \[engine\] 'rat'.*rate"):
        resolve(Engine, "engine", {})


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"[engine\n", "sapwood.toml is not TOML"),
        (b"# \xff\n", "sapwood.toml is not TOML"),
        (b"engine = 3\n", "[engine] must be a table, got 3"),
    ],
)
def test_a_damaged_file_is_named(file: Path, content: bytes, told: str) -> None:
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=re.escape(told)):
        resolve(Engine, "engine", {})


def test_a_named_file_must_exist(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAPWOOD_CONFIG", "nowhere.toml")
    with pytest.raises(ConfigError, match=r"SAPWOOD_CONFIG names nowhere\.toml, which is not"):
        resolve(Engine, "engine", {})


def test_unknown_sections_are_refused(file: Path) -> None:
    file.write_text("[syncs]\ncount = 1\n")
    with pytest.raises(
        ConfigError, match=r"unknown section \[syncs\].*known: run, sync.*did you mean 'sync'"
    ):
        resolve(Engine, "engine", {})
    file.write_text("count = 1\n")
    with pytest.raises(ConfigError, match=r"'count' outside of a section.*\[sync\]"):
        resolve(Engine, "engine", {})


def test_unknown_variables_are_warned_of_once(monkeypatch, caplog) -> None:
    monkeypatch.setenv("SAPWOOD_RATEE", "3")
    monkeypatch.setenv("SAPWOOD_RATE", "3")
    monkeypatch.setattr(settings, "_warned", set())
    for _ in range(2):
        settings.warn_of_unknown_variables([Engine])
    (record,) = [r for r in caplog.records if "RATE" in r.getMessage()]
    assert "SAPWOOD_RATEE is set" in record.getMessage()
    assert "did you mean 'SAPWOOD_RATE'?" in record.getMessage()


def test_every_variable_of_the_source_is_known() -> None:
    source = Path(settings.__file__).parents[1]
    found = set()
    for path in source.rglob("*.py"):
        found |= set(re.findall(r"SAPWOOD_[A-Z0-9_]*[A-Z0-9]", path.read_text()))
    fields = {"SAPWOOD_BUCKET_MB", "SAPWOOD_FOLDER"}  # examples in texts
    assert {name for name in found if not name.startswith("SAPWOOD_BENCH")} <= (
        settings.VARIABLES | fields | {"SAPWOOD_TEST"}
    )
