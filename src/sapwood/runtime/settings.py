"""Settings with an origin: argument over environment over file over default.

A settings class is a frozen, keyword-only dataclass. A field ``bucket_mb`` of the section ``sync``
is set by an argument, by ``SAPWOOD_BUCKET_MB``, or by ``bucket_mb`` in ``[sync]`` of the file that
``SAPWOOD_CONFIG`` names (``sapwood.toml`` in the current folder if there is one).
"""

from __future__ import annotations

import dataclasses
import os
import tomllib
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from sapwood.errors import ConfigError

__all__ = ["UNSET", "Resolved", "resolve"]

T = TypeVar("T")


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
            values[name], origins[name] = arguments[name], "argument"
        elif variable in os.environ:
            values[name] = _parse(os.environ[variable], hints[name], variable)
            origins[name] = f"environment {variable}"
        elif name in table:
            values[name], origins[name] = table[name], f"file {path}"
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
        table = tomllib.loads(path.read_text())
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is not TOML: {error}") from error
    found = table.get(section, {})
    if not isinstance(found, dict):
        raise ConfigError(f"{path}: [{section}] must be a table, got {found!r}")
    return str(path), found


def _parse(text: str, hint: Any, where: str) -> Any:
    options = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    if type(None) in options and text.lower() in ("", "none"):
        return None
    for option in options:
        if option is bool and text.lower() in ("1", "true", "yes", "on"):
            return True
        if option is bool and text.lower() in ("0", "false", "no", "off"):
            return False
        if option in (int, float):
            try:
                return option(text)
            except ValueError:
                continue
        if option is str or typing.get_origin(option) is typing.Literal:
            return text
    raise ConfigError(f"{where} is {text!r}, expected {hint}")
