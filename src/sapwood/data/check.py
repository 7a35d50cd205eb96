"""Arguments of public functions, checked before anything is done with them.

A wrong type is a ``ConfigError`` that names the argument, here and at once, and not a ``TypeError``
of numpy's in the middle of the first epoch.
"""

from __future__ import annotations

import math
import numbers
import operator
import os
import reprlib
from collections.abc import Collection, Sequence

from sapwood.errors import ConfigError

__all__ = [
    "database_name",
    "optional_callable",
    "optional_int",
    "optional_strs",
    "require_bool",
    "require_callable",
    "require_choice",
    "require_instance",
    "require_int",
    "require_number",
    "require_path",
    "require_str",
]


def _refuse(name: str, value: object, expected: str) -> ConfigError:
    kind = type(value).__name__
    return ConfigError(f"{name}={reprlib.repr(value)} (of type {kind}): expected {expected}")


def require_int(name: str, value: object, *, least: int | None = None) -> int:
    """A whole number, numpy's included; a bool is none, and neither is 3.0.

    Raises:
        ConfigError: it is something else, or less than ``least``.
    """
    if isinstance(value, bool) or not hasattr(type(value), "__index__"):
        raise _refuse(name, value, "a whole number")
    try:
        found = operator.index(value)  # type: ignore[arg-type]
    except TypeError as error:  # an array or a tensor of several
        raise _refuse(name, value, "a whole number") from error
    if least is not None and found < least:
        raise ConfigError(f"{name}={found}: expected {least} or more")
    return int(found)


def optional_int(name: str, value: object, *, least: int | None = None) -> int | None:
    """A whole number, or None.

    Raises:
        ConfigError: it is something else, or less than ``least``.
    """
    if value is None:
        return None
    if isinstance(value, bool) or not hasattr(type(value), "__index__"):
        raise _refuse(name, value, "a whole number, or None")
    return require_int(name, value, least=least)


def require_number(name: str, value: object) -> float:
    """A finite number.

    Raises:
        ConfigError: it is something else.
    """
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise _refuse(name, value, "a number")
    if not math.isfinite(value):
        raise ConfigError(f"{name}={value}: expected a finite number")
    return float(value)


def require_bool(name: str, value: object) -> bool:
    """True or False; any other thing would count as one of them, and mostly as the wrong one.

    Raises:
        ConfigError: it is neither.
    """
    if not isinstance(value, bool):
        raise _refuse(name, value, "True or False")
    return value


def require_choice(name: str, value: object, known: Collection[str]) -> str:
    """One of some words.

    Raises:
        ConfigError: it is none of them.
    """
    if not isinstance(value, str) or value not in known:
        raise ConfigError(f"{name}={reprlib.repr(value)}: expected one of {', '.join(known)}")
    return value


def require_str(name: str, value: object) -> str:
    """A text.

    Raises:
        ConfigError: it is something else.
    """
    if not isinstance(value, str):
        raise _refuse(name, value, "a text")
    return value


def optional_strs(name: str, value: object) -> None:
    """None, or several texts; a single text would be taken for its letters.

    Raises:
        ConfigError: it is something else.
    """
    if value is None:
        return
    if isinstance(value, str | bytes) or not isinstance(value, Sequence):
        raise _refuse(name, value, "a list of texts, or None")
    for one in value:
        require_str(f"an element of {name}", one)


def require_path(name: str, value: object) -> str | os.PathLike[str]:
    """The path of a file or folder.

    Raises:
        ConfigError: it is none.
    """
    if not isinstance(value, str | os.PathLike):
        raise _refuse(name, value, "a path: str or os.PathLike")
    if not isinstance(os.fspath(value), str):
        raise _refuse(name, value, "a path of text and not of bytes")
    return value


def database_name(value: object) -> bytes | None:
    """The name of a named database as LMDB has it; None is the main one.

    Raises:
        ConfigError: it is no name.
    """
    if value is None or isinstance(value, bytes):
        return value
    if not isinstance(value, str):
        raise _refuse("database", value, "the name of a database: str, bytes, or None")
    return value.encode()


def require_callable(name: str, value: object) -> None:
    """Something that can be called.

    Raises:
        ConfigError: it cannot.
    """
    if not callable(value):
        raise _refuse(name, value, "something that can be called")


def optional_callable(name: str, value: object) -> None:
    """Something that can be called, or None.

    Raises:
        ConfigError: it is neither.
    """
    if value is not None and not callable(value):
        raise _refuse(name, value, "something that can be called, or None")


def require_instance(name: str, value: object, kind: type, *, none: bool = False) -> None:
    """An object of a class, or None where that is allowed.

    Raises:
        ConfigError: it is something else.
    """
    if not isinstance(value, kind) and not (none and value is None):
        raise _refuse(name, value, f"a {kind.__name__}" + (", or None" if none else ""))
