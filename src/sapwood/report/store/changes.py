"""What may be changed from the page, for who has the token: tags, and which versions are there."""

from __future__ import annotations

import hmac
import json
from collections.abc import Mapping
from typing import Any

from starlette.datastructures import Headers

from sapwood.errors import ConfigError, Denied, StoreError
from sapwood.report.store.plain import brief
from sapwood.repository.base import ModelRecord
from sapwood.store import Repository

__all__ = ["Changes", "Conflict"]

_SCHEME = "bearer "


class Conflict(StoreError):
    """What the page shows is not what is there any more."""


class Changes:
    """Checks the token, then changes the repository."""

    def __init__(self, repo: Repository, token: str | None) -> None:
        """Without a token nothing can be changed."""
        self._repo = repo
        self._token = token.encode() if token is not None else None

    @property
    def possible(self) -> bool:
        """Whether there is a token that opens it."""
        return self._token is not None

    def allowed(self, headers: Headers) -> bool:
        """Whether a request has the token."""
        given = headers.getlist("authorization")
        if self._token is None or len(given) != 1 or not given[0].lower().startswith(_SCHEME):
            return False
        return hmac.compare_digest(given[0][len(_SCHEME) :].strip().encode(), self._token)

    def apply(self, what: str, headers: Headers, body: bytes) -> dict[str, Any]:
        """Do one change.

        Raises:
            Denied: the token is not there, or another one.
            ConfigError: the request is not well formed.
            Conflict: another version has the name by now.
        """
        if not self.possible:
            raise Denied(
                "this page is read-only; start it with --token-file to change something from here"
            )
        if not self.allowed(headers):
            raise Denied("this needs the token that the server was started with")
        words = _words(body)
        if what == "untag":
            self._repo.untag(_text(words, "name"), _text(words, "tag"))
            return {}
        record = self._shown(words)
        if what == "tag":
            return brief(self._repo.tag(str(record.reference), _text(words, "tag")))
        if _text(words, "confirm") != str(record.reference):
            raise ConfigError(f"to remove it, confirm with its whole name, {record.reference}")
        return brief(self._repo.remove(str(record.reference)))

    def _shown(self, words: Mapping[str, Any]) -> ModelRecord:
        """The version that the page showed: its name may stand for another one by now."""
        reference = _text(words, "ref")
        record = self._repo.info(reference)
        if str(record.reference) != reference:
            raise ConfigError(f"{reference!r} names no version; expected {record.reference}")
        if str(record.id) != _text(words, "id"):
            raise Conflict(
                f"{reference} was removed and saved anew since the page was loaded; reload it"
            )
        return record


def _words(body: bytes) -> dict[str, Any]:
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise ConfigError("expected a JSON object")
    return found


def _text(words: Mapping[str, Any], key: str) -> str:
    found = words.get(key)
    if not isinstance(found, str):
        raise ConfigError(f"{key} is missing, or no text")
    return found
