"""Settings with an origin: argument over environment over file over default.

A settings class is a frozen, keyword-only dataclass. A field ``bucket_mb`` of the section ``sync``
is set by an argument, by ``SAPWOOD_BUCKET_MB``, or by ``bucket_mb`` in ``[sync]`` of the file that
``SAPWOOD_CONFIG`` names (``sapwood.toml`` in the current folder if there is one).
"""

from __future__ import annotations

import dataclasses
import numbers
import os
import tomllib
import types
import typing
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from sapwood.errors import ConfigError

__all__ = ["UNSET", "Resolved", "resolve"]

T = TypeVar("T")
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


def resolve(kind: type[T], section: str, arguments: Mapping[str, Any]) -> Resolved[T]:
    """Make ``kind`` from the arguments that are not UNSET, the environment, the file, defaults."""
    fields = {f.name: f for f in dataclasses.fields(kind)}  # type: ignore[arg-type]
    unknown = sorted(set(arguments) - set(fields))
    if unknown:
        raise ConfigError(f"unknown setting {unknown[0]!r}; known: {', '.join(sorted(fields))}")
    hints = typing.get_type_hints(kind)
    values: dict[str, Any] = {}
    origins = dict.fromkeys(fields, "default")
    path, table = _file(section)
    for name in fields:
        variable = f"SAPWOOD_{name.upper()}"
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
        raise ConfigError(f"{path} sets unknown [{section}] {strange[0]!r}; known: {list(fields)}")
    return Resolved(kind(**values), origins)


def _file(section: str) -> tuple[str, dict[str, Any]]:
    named = os.environ.get("SAPWOOD_CONFIG")
    path = Path(named or "sapwood.toml")
    if not path.is_file():
        if named:
            raise ConfigError(f"SAPWOOD_CONFIG names {named}, which is not a file")
        return "", {}
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read the settings in {path}: {error.strerror}") from error
    except ValueError as error:  # also what is not UTF-8
        raise ConfigError(f"{path} is not TOML: {error}") from error
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
