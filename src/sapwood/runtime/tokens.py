"""Tokens that say who may ask a server, kept in files that only their owner can read."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from sapwood.errors import ConfigError
from sapwood.regular import open_regular

__all__ = ["check_token", "read_or_make_token", "read_token"]

_SHORTEST = 16


def check_token(token: str, what: str) -> str:
    """The token, if it is one.

    Raises:
        ConfigError: it is not; ``what`` says where it stands.
    """
    if len(token) < _SHORTEST or not token.isascii() or not token.isprintable() or " " in token:
        raise ConfigError(
            f"{what} holds no token: expected one line of at least {_SHORTEST} letters and digits "
            "without blanks, such as `openssl rand -hex 32` gives"
        )
    return token


def read_token(file: Path) -> str:
    """The token in a file.

    Raises:
        ConfigError: it cannot be read, others may read it, or there is no token in it.
    """
    try:
        fd = open_regular(file)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"cannot read the token in {file}: {getattr(error, 'strerror', None) or error}"
        ) from error
    with os.fdopen(fd, "rb") as opened:
        if os.fstat(fd).st_mode & 0o077:
            raise ConfigError(f"others can read the token in {file}; run chmod 600 {file}")
        content = opened.read(4096)
    return check_token(content.decode("ascii", "replace").strip(), str(file))


def read_or_make_token(file: Path) -> tuple[str, bool]:
    """The token in a file, and whether it was made now, as there was no such file.

    Raises:
        ConfigError: as ``read_token``, or it cannot be made.
    """
    token = secrets.token_urlsafe(32)
    try:
        # Only one of several that start at the same time makes it.
        fd = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        return read_token(file), False
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"cannot read the token in {file}, nor make one: "
            f"{getattr(error, 'strerror', None) or error}"
        ) from error
    with os.fdopen(fd, "w") as made:
        made.write(f"{token}\n")
    return token, True
