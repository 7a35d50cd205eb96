"""Argument over environment over file over default, and a value of the wrong kind is refused."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

import numpy
import pytest
import torch

import sapwood
from sapwood import run
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
    monkeypatch.setenv("SAPWOOD_ENGINE_RATE", "3.5")
    monkeypatch.setenv("SAPWOOD_ENGINE_COUNT", "5")
    resolved = resolve(Engine, "engine", {"rate": 4.5, "count": UNSET})
    assert resolved.value == Engine(rate=4.5, count=5, mode="fast")
    assert resolved.origins["rate"] == "argument"
    assert resolved.origins["count"] == "environment SAPWOOD_ENGINE_COUNT"
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
    monkeypatch.setenv(f"SAPWOOD_ENGINE_{name.upper()}", text)
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
    monkeypatch.setenv(f"SAPWOOD_ENGINE_{name.upper()}", text)
    message = f"SAPWOOD_ENGINE_{name.upper()} is {text!r}, expected {wanted}"
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
    monkeypatch.setenv("SAPWOOD_ENGINE_RATEE", "3")
    monkeypatch.setenv("SAPWOOD_ENGINE_RATE", "3")
    monkeypatch.setattr(settings, "_warned", set())
    for _ in range(2):
        settings.warn_of_unknown_variables({"engine": Engine})
    (record,) = [r for r in caplog.records if "RATE" in r.getMessage()]
    assert "SAPWOOD_ENGINE_RATEE is set" in record.getMessage()
    assert "did you mean 'SAPWOOD_ENGINE_RATE'?" in record.getMessage()


# -- one variable, one setting ---------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Other:
    rate: float = 7.0
    host: str = ""


def test_a_variable_changes_the_setting_of_one_section_only(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SAPWOOD_ENGINE_RATE", "2")
    assert resolve(Engine, "engine", {}).value.rate == 2
    assert resolve(Other, "other", {}).value.rate == 7


def test_a_variable_without_a_section_is_refused_with_the_new_name(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SAPWOOD_RATE", "2")
    with pytest.raises(ConfigError, match=r"set SAPWOOD_ENGINE_RATE \(for \[engine\]\) instead"):
        resolve(Engine, "engine", {})
    # Also where an argument would have been stronger: whoever set it believes that it works.
    with pytest.raises(ConfigError, match="unset SAPWOOD_RATE"):
        resolve(Engine, "engine", {"rate": 3.0})
    with pytest.raises(ConfigError, match=r"SAPWOOD_ENGINE_RATE .* or SAPWOOD_OTHER_RATE "):
        settings.check_variables({"engine": Engine, "other": Other})


def test_a_variable_that_is_no_setting_may_be_called_like_one(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SAPWOOD_HOST", "10.0.0.1")  # of the machine, for all that needs it
    assert resolve(Other, "other", {}).value.host == ""
    monkeypatch.setenv("SAPWOOD_OTHER_HOST", "10.0.0.2")
    assert resolve(Other, "other", {}).value.host == "10.0.0.2"


def test_no_two_settings_share_a_variable() -> None:
    names = [
        settings.variable_of(section, field.name)
        for section, kind in run.SETTINGS.items()
        for field in fields(kind)
    ]
    assert len(set(names)) == len(names)
    assert not set(names) & settings.VARIABLES
    # Nor does a setting's variable look like the old name of another one.
    old = {f"SAPWOOD_{f.name.upper()}" for kind in run.SETTINGS.values() for f in fields(kind)}
    assert not set(names) & old
    assert tuple(run.SETTINGS) == settings.SECTIONS


@pytest.mark.parametrize(
    ("old", "told"),
    [
        ("SAPWOOD_ENGINE", "SAPWOOD_SYNC_ENGINE .* or SAPWOOD_CHECKPOINT_ENGINE"),
        ("SAPWOOD_PATIENCE", "SAPWOOD_CHECKPOINT_PATIENCE .* or SAPWOOD_CLONE_PATIENCE"),
        ("SAPWOOD_FOLDER", "SAPWOOD_RUN_FOLDER"),
        ("SAPWOOD_EVERY", "SAPWOOD_CHECKPOINT_EVERY"),
    ],
)
def test_a_run_refuses_old_variables_before_it_does_anything(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, old: str, told: str
) -> None:
    monkeypatch.setenv(old, "ddp")
    model = torch.nn.Linear(2, 2)
    with pytest.raises(ConfigError, match=told):
        sapwood.Run(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert not list(tmp_path.iterdir())


def test_the_engine_of_a_run_is_not_the_engine_of_its_checkpoints(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SAPWOOD_CHECKPOINT_ENGINE", "sync")
    monkeypatch.setenv("SAPWOOD_SYNC_ENGINE", "layerwise")
    model = torch.nn.Linear(2, 2)
    with (
        sapwood.Run(model, torch.optim.SGD(model.parameters(), lr=0.1)) as training,
        sapwood.Checkpointer(training) as ckpt,
    ):
        assert ckpt.settings.engine == "sync"


def test_every_variable_of_the_source_is_known() -> None:
    source = Path(settings.__file__).parents[1]
    found = set()
    for path in source.rglob("*.py"):
        found |= set(re.findall(r"SAPWOOD_[A-Z0-9_]*[A-Z0-9]", path.read_text()))
    ours = {
        settings.variable_of(section, field.name)
        for section, kind in run.SETTINGS.items()
        for field in fields(kind)
    }
    parts = {f"SAPWOOD_{section.upper()}" for section in run.SETTINGS}  # of texts with a <NAME>
    old = {"SAPWOOD_ENGINE"}  # of a comment that says why it went
    assert {name for name in found if not name.startswith("SAPWOOD_BENCH")} <= (
        settings.VARIABLES | ours | parts | old | {"SAPWOOD_TEST"}
    )
