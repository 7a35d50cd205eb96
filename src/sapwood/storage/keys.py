"""Names of objects: what every keeper can hold, on any file system and in any bucket."""

from __future__ import annotations

import re

from sapwood.errors import BadKey

__all__ = ["LONGEST", "checked_folder", "checked_key", "is_key"]

LONGEST = 800
"""Characters of a whole key: S3 ends at 1024 bytes, of which a prefix takes some."""
_PART = r"[A-Za-z0-9][A-Za-z0-9._+@=-]{0,199}"
_KEY = re.compile(rf"{_PART}(?:/{_PART})*")


def is_key(text: str) -> bool:
    """Whether a text is a key."""
    return len(text) <= LONGEST and _KEY.fullmatch(text) is not None


def checked_key(key: object) -> str:
    """A key, before anything is touched.

    Raises:
        BadKey: it is none.
    """
    if isinstance(key, str) and is_key(key):
        return key
    raise BadKey(
        f"{_shown(key)} is no key of an object; expected parts of letters, digits and any of "
        f"._+@=- joined by '/', each beginning with a letter or digit and of at most 200 "
        f"characters, {LONGEST} in all"
    )


def checked_folder(folder: object) -> str:
    """What ``list`` looks below: nothing, or the first parts of keys.

    Raises:
        BadKey: it is neither.
    """
    return "" if folder == "" else checked_key(folder)


def _shown(key: object) -> str:
    text = repr(key)
    return text if len(text) <= 100 else f"{text[:80]}... ({len(text)} characters)"
