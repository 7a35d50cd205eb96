"""Who may do what: tokens with rights for names of models.

    # rights.toml
    [training]
    token-file = "training.token"            # beside this file
    rights = { "nt3/*" = ["read", "write"] }

    [ops]
    token-file = "ops.token"
    rights = { "*" = ["admin"] }

A pattern is a name, or the beginning of names with ``*`` behind it. ``admin`` includes the others,
and for ``*`` also gc, verify and the list of members.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sapwood.channel.handshake import key_of
from sapwood.errors import ConfigError, Denied
from sapwood.runtime.tokens import read_token

__all__ = ["RIGHTS", "Rights", "load_rights", "owner_rights"]

RIGHTS = ("read", "write", "delete", "admin")


@dataclass(frozen=True)
class Rights:
    """What one token may do."""

    owner: str
    """The token's name."""
    patterns: Mapping[str, frozenset[str]]

    def allows(self, right: str, name: str) -> bool:
        """Whether it has a right to a model; the name ``*`` means all models."""
        return any(
            right in rights or "admin" in rights
            for pattern, rights in self.patterns.items()
            if pattern == name or (pattern.endswith("*") and name.startswith(pattern[:-1]))
        )

    def check(self, right: str, name: str) -> None:
        """Refuse what is not allowed.

        Raises:
            Denied: names the right and the model.
        """
        if not self.allows(right, name):
            what = "all models" if name == "*" else repr(name)
            raise Denied(
                f"the token {self.owner!r} has no {right!r} right to {what}; ask whoever keeps the "
                "provider's rights file"
            )


def owner_rights() -> Rights:
    """All rights: of the one token of a provider without a rights file."""
    return Rights("owner", {"*": frozenset(RIGHTS)})


def load_rights(path: Path) -> dict[str, tuple[str, Rights]]:
    """Tokens with their rights, by the tokens' public names (``handshake.key_of``).

    Raises:
        ConfigError: the file, or a token's, cannot be read or is not well formed.
    """
    try:
        found = tomllib.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"the rights file {path} cannot be read: {error}") from error
    tokens: dict[str, tuple[str, Rights]] = {}
    for owner, entry in found.items():
        token, rights = _entry(path, owner, entry)
        if key_of(token) in tokens:
            raise ConfigError(f"{path}: two entries have the token of [{owner}]")
        tokens[key_of(token)] = token, rights
    if not tokens:
        raise ConfigError(f"{path} has no token; each is a table [name] with token-file and rights")
    return tokens


def _entry(path: Path, owner: str, entry: Any) -> tuple[str, Rights]:
    if not isinstance(entry, dict) or set(entry) != {"token-file", "rights"}:
        raise ConfigError(f"{path}: [{owner}] has token-file and rights, and nothing else")
    if not isinstance(entry["token-file"], str) or not isinstance(entry["rights"], dict):
        raise ConfigError(f"{path}: [{owner}] has a path as token-file and a table as rights")
    patterns = {}
    for pattern, rights in entry["rights"].items():
        if "*" in pattern[:-1] or "?" in pattern or "[" in pattern:
            raise ConfigError(
                f"{path}: [{owner}] has the pattern {pattern!r}; it is a name, or the beginning of "
                "names with * behind it"
            )
        patterns[pattern] = frozenset(_rights(path, owner, rights))
    return read_token(path.parent / entry["token-file"]), Rights(owner, patterns)


def _rights(path: Path, owner: str, rights: Any) -> Iterable[str]:
    if not isinstance(rights, list) or not all(one in RIGHTS for one in rights):
        raise ConfigError(f"{path}: [{owner}] has the rights {rights!r}, expected some of {RIGHTS}")
    return rights
