"""Names of models as ids that clients of the Hugging Face hub accept, and revisions as commits."""

from __future__ import annotations

import hashlib
import re

from sapwood.repository.base import ModelRecord

__all__ = ["commit_of", "hub_id"]

_LONGEST = 96
_REFUSED = re.compile(r"(?<=-)-|(?<=\.)\.|[+=]|[-.]$|\.(?=git$)")


def hub_id(name: str) -> str:
    """The id of a model: ``repo`` or ``namespace/repo``, which most names are already.

    Further parts of a name are joined by ``__``, and what clients refuse is written as ``_`` with
    its code: ``nt3/lr=0.1/run7`` is ``nt3/lr_3D0.1__run7``.
    """
    first, *rest = name.split("/")
    parts = [first, "__".join(rest)] if rest else [first]
    return "/".join(map(_part, parts))


def commit_of(record: ModelRecord) -> str:
    """What stands for a commit: forty hexadecimal digits that are a version's alone."""
    facts = f"{record.name}@{record.version}#{record.id} {record.created!r}"
    return hashlib.blake2b(facts.encode(), digest_size=20).hexdigest()


def _part(text: str) -> str:
    plain = _REFUSED.sub(lambda found: f"_{ord(found[0]):02X}", text)
    if len(plain) <= _LONGEST:
        return plain
    mark = hashlib.blake2b(text.encode(), digest_size=6).hexdigest()
    return f"{plain[: _LONGEST - len(mark) - 1]}_{mark}"
