"""Settings with an origin: argument over environment over file over default.

A settings class is a frozen, keyword-only dataclass. A field ``bucket_mb`` of the section ``sync``
is set by an argument, by ``SAPWOOD_SYNC_BUCKET_MB``, or by ``bucket_mb`` in ``[sync]`` of the file
that ``SAPWOOD_CONFIG`` names (``sapwood.toml`` in the current folder if there is one).
"""

from __future__ import annotations

import dataclasses
import difflib
import logging
import numbers
import os
import tomllib
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from sapwood.errors import ConfigError
from sapwood.regular import read_regular

__all__ = [
    "SECTIONS",
    "UNSET",
    "VARIABLES",
    "Resolved",
    "check_variables",
    "resolve",
    "variable_of",
    "warn_of_unknown_variables",
]

log = logging.getLogger(__name__)

T = TypeVar("T")
SECTIONS = ("run", "sync", "checkpoint", "clone")
"""Sections of the file; they are read by different parts of a run, each of which knows its own."""
VARIABLES = frozenset(
    f"SAPWOOD_{name}"
    for name in (
        *(
            "BIND",
            "CONFIG",
            "DEBUG",
            "FAULTS",
            "FORK",
            "HOST",
            "LAUNCHER_PID",
            "LAUNCH_NOTES",
            "LOCAL",
        ),
        *("MOONCAKE_DEVICE", "MOONCAKE_PROTOCOL", "NODE", "SOCKET_IFNAME"),
        *("STORE", "STORE_TLS_CA", "STORE_TOKEN", "STORE_TOKEN_FILE"),
    )
)
"""Variables of ours that are not settings."""
_PRIVATE = ("SAPWOOD_BENCH_", "SAPWOOD_TEST_")
_warned: set[str] = set()
_WORDS = dict.fromkeys(("1", "true", "yes", "on"), True)
_WORDS |= dict.fromkeys(("0", "false", "no", "off"), False)
_IN_WORDS = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    Path: "a path",
}


class _Unset:
    def __repr__(self) -> str:
        return "UNSET"

    def __bool__(self) -> bool:
        return False


UNSET: Any = _Unset()
"""An argument that was not given, so that the environment, the file or the default decides."""


@dataclasses.dataclass(frozen=True, slots=True)
class Resolved(typing.Generic[T]):
    """A settings object and where each of its values came from."""

    value: T
    origins: Mapping[str, str]


def variable_of(section: str, name: str) -> str:
    """The variable that sets a field: two sections may have fields of one name."""
    return f"SAPWOOD_{section.upper()}_{name.upper()}"


def resolve(
    kind: type[T], section: str, arguments: Mapping[str, Any], *, beside: Sequence[str] = ()
) -> Resolved[T]:
    """Make ``kind`` from the arguments that are not UNSET, the environment, the file, defaults.

    ``beside`` names what the caller takes besides, for the message about an unknown argument.
    """
    fields = {f.name: f for f in dataclasses.fields(kind)}  # type: ignore[arg-type]
    unknown = sorted(set(arguments) - set(fields))
    if unknown:
        known = sorted({*fields, *beside})
        raise ConfigError(
            f"unknown setting {unknown[0]!r}; known: {', '.join(known)}{_near(unknown[0], known)}"
        )
    check_variables({section: kind})
    hints = typing.get_type_hints(kind)
    values: dict[str, Any] = {}
    origins = dict.fromkeys(fields, "default")
    path, table = _file(section)
    for name in fields:
        variable = variable_of(section, name)
        if name in arguments and arguments[name] is not UNSET:
            values[name] = _fit(arguments[name], hints[name], f"the argument {name}")
            origins[name] = "argument"
        elif variable in os.environ:
            values[name] = _parse(os.environ[variable], hints[name], variable)
            origins[name] = f"environment {variable}"
        elif name in table:
            values[name] = _fit(table[name], hints[name], f"{name} in [{section}] of {path}")
            origins[name] = f"file {path}"
    strange = sorted(set(table) - set(fields))
    if strange:
        near = _near(strange[0], fields)
        raise ConfigError(
            f"{path} sets unknown [{section}] {strange[0]!r}; known: {list(fields)}{near}"
        )
    return Resolved(kind(**values), origins)


def check_variables(kinds: Mapping[str, type]) -> None:
    """Refuse variables that name a setting and no section, as those of older versions did.

    Refused and not read: ``SAPWOOD_ENGINE`` meant a setting of the Run and one of the Checkpointer.

    Args:
        kinds: the settings class of each section to look for.

    Raises:
        ConfigError: one is set; what to set instead.
    """
    for old, fields in _unscoped(kinds).items():
        if old in os.environ:
            ours = " or ".join(f"{variable_of(*field)} (for [{field[0]}])" for field in fields)
            raise ConfigError(
                f"{old} is set, but a variable names its section now: set {ours} instead, and "
                f"unset {old}"
            )


def _unscoped(kinds: Mapping[str, type]) -> dict[str, list[tuple[str, str]]]:
    """Names of variables without a section, and the sections and fields they may stand for."""
    found: dict[str, list[tuple[str, str]]] = {}
    for section, kind in kinds.items():
        for field in dataclasses.fields(kind):
            found.setdefault(f"SAPWOOD_{field.name.upper()}", []).append((section, field.name))
    return {name: fields for name, fields in found.items() if name not in VARIABLES}


def warn_of_unknown_variables(kinds: Mapping[str, type]) -> None:
    """Log, once for each, variables with our prefix that are none of ours: likely misspelt.

    Not refused, because other programs may use the prefix. ``kinds`` has the settings class of each
    section.
    """
    fields = ((s, f.name) for s, kind in kinds.items() for f in dataclasses.fields(kind))
    known = {*VARIABLES, *(variable_of(*field) for field in fields)}
    for name in sorted(os.environ):
        if not name.startswith("SAPWOOD_") or name.startswith(_PRIVATE):
            continue
        if name not in known and name not in _warned:
            _warned.add(name)
            log.warning("%s is set, but means nothing to Sapwood%s", name, _near(name, known))


def _near(name: str, known: Iterable[str]) -> str:
    found = difflib.get_close_matches(name, sorted(known), n=1)
    return f"; did you mean {found[0]!r}?" if found else ""


def _check_sections(path: Path, table: Mapping[str, Any], section: str) -> None:
    known = dict.fromkeys((*SECTIONS, section))
    for name, value in table.items():
        if name in known:
            continue
        if not isinstance(value, dict):
            raise ConfigError(
                f"{path} sets {name!r} outside of a section; put it below one of "
                f"{', '.join(f'[{one}]' for one in known)}"
            )
        raise ConfigError(
            f"{path} has an unknown section [{name}]; known: {', '.join(known)}{_near(name, known)}"
        )


def _file(section: str) -> tuple[str, dict[str, Any]]:
    named = os.environ.get("SAPWOOD_CONFIG")
    path = Path(named or "sapwood.toml")
    if not path.is_file():
        if named:
            raise ConfigError(f"SAPWOOD_CONFIG names {named}, which is not a file")
        if os.path.lexists(path):  # somebody believes that their settings hold
            raise ConfigError(f"{path} is not a file; remove it, or put the settings there")
        return "", {}
    try:
        table = tomllib.loads(read_regular(path).decode("utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read the settings in {path}: {error.strerror}") from error
    except ValueError as error:  # also what is not UTF-8
        raise ConfigError(f"{path} is not TOML: {error}") from error
    _check_sections(path, table, section)
    found = table.get(section, {})
    if not isinstance(found, dict):
        raise ConfigError(f"{path}: [{section}] must be a table, got {found!r}")
    return str(path), found


def _parse(text: str, hint: Any, where: str) -> Any:
    """The value a text stands for."""
    if type(None) in _options(hint) and text.lower() in ("", "none"):
        return None
    for option in _options(hint):
        if option is bool and text.lower() in _WORDS:
            return _WORDS[text.lower()]
        if option in (int, float):
            with suppress(ValueError):
                return option(text)
        if typing.get_origin(option) is typing.Literal:
            for choice in typing.get_args(option):
                if text == str(choice):
                    return choice
        if option in (str, Path):
            return option(text)
    raise ConfigError(f"{where} is {text!r}, expected {_named(hint)}")


def _fit(value: Any, hint: Any, where: str) -> Any:
    """The value as the type asked for; whole numbers are fine where fractions are."""
    for option in _options(hint):
        if option is float and _is_a(value, numbers.Real):
            return float(value)
        if option is int and _is_a(value, numbers.Integral):
            return int(value)
        if typing.get_origin(option) is typing.Literal:
            # Compared with the type, because 1 == True.
            if any(type(value) is type(one) and value == one for one in typing.get_args(option)):
                return value
        elif option is Any or _is_plainly(value, option):
            return value
    raise ConfigError(f"{where} is {value!r}, expected {_named(hint)}")


def _is_a(value: Any, kind: type) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)


def _is_plainly(value: Any, option: Any) -> bool:
    return option not in (int, float) and isinstance(value, typing.get_origin(option) or option)


def _options(hint: Any) -> tuple[Any, ...]:
    union = typing.get_origin(hint) in (types.UnionType, typing.Union)
    return typing.get_args(hint) if union else (hint,)


def _named(hint: Any) -> str:
    return " or ".join(_option_named(option) for option in _options(hint))


def _option_named(option: Any) -> str:
    if typing.get_origin(option) is typing.Literal:
        return "one of " + ", ".join(map(repr, typing.get_args(option)))
    if option is type(None):
        return "none"
    return _IN_WORDS.get(option) or str(getattr(option, "__name__", option))
