"""Which tensors of a model are meant: by pattern, by module, or all."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from fnmatch import translate

from sapwood.errors import ModelNotFound
from sapwood.repository.manifest import Manifest
from sapwood.repository.names import nearest

__all__ = ["select"]


def select(manifest: Manifest, layers: str | Iterable[str] | None, what: str) -> list[str]:
    """The names that any of the patterns fits, in the model's order; None means all.

    A pattern is a name, the name of a module, or has ``*``, ``?`` or ``[...]`` in it, which fit any
    part of a name, dots as well.

    Raises:
        ModelNotFound: a pattern fits nothing; says what is like it.
    """
    names = [name for name, _ in manifest.names]
    if layers is None:
        return names
    patterns = [layers] if isinstance(layers, str) else list(layers)
    chosen: set[str] = set()
    below = _below(names)
    for pattern in patterns:
        fitting = below.get(pattern) or _fitting(names, pattern)
        if not fitting:
            known = [*names, *{name.rpartition(".")[0] for name in names if "." in name}]
            raise ModelNotFound(f"{what} has no tensor {pattern!r}{nearest(pattern, known)}")
        chosen.update(fitting)
    return [name for name in names if name in chosen]


def _below(names: Sequence[str]) -> dict[str, list[str]]:
    """By the name of a tensor or a module: the tensors that are it, or inside it."""
    found: dict[str, list[str]] = {}
    for name in names:
        found.setdefault(name, []).append(name)
        end = name.rfind(".")
        while end >= 0:
            found.setdefault(name[:end], []).append(name)
            end = name.rfind(".", 0, end)
    return found


def _fitting(names: Sequence[str], pattern: str) -> list[str]:
    fits = re.compile(translate(pattern)).match
    return [n for n in names if fits(n)]
