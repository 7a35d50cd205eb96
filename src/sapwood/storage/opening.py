"""Keepers by URL: one registry entry each."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from sapwood.errors import ConfigError
from sapwood.storage.base import Keeper

__all__ = ["Factory", "open_keeper", "register", "schemes"]

Factory = Callable[..., Keeper]
"""Called with the URL, and with options as keywords."""
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):")


def _memory(url: str, **options: Any) -> Keeper:
    from sapwood.storage.memory import MemoryKeeper

    if url != "memory:":
        raise ConfigError(f"{url!r}: memory has no places; write memory:")
    return MemoryKeeper(**options)


def _folder(url: str, **options: Any) -> Keeper:
    from sapwood.storage.folder import FolderKeeper

    parts = urlsplit(url)
    if parts.netloc not in ("", "localhost") or not parts.path or parts.query or parts.fragment:
        raise ConfigError(f"{url!r} is no folder of this machine; write file:///folder, or a path")
    return FolderKeeper(Path(unquote(parts.path)), **options)


def _s3(url: str, **options: Any) -> Keeper:
    from sapwood.storage.s3.keeper import S3Keeper  # it imports obstore, which is an extra

    return S3Keeper(url, **options)


def _mooncake(url: str, **options: Any) -> Keeper:
    from sapwood.storage.mooncake.keeper import MooncakeKeeper  # an extra as well

    return MooncakeKeeper(url, **options)


_factories: dict[str, Factory] = {
    "memory": _memory,
    "file": _folder,
    "s3": _s3,
    "mooncake": _mooncake,
}


def register(scheme: str, factory: Factory) -> None:
    """Let ``open_keeper`` know URLs that begin with ``scheme:``; an earlier entry gives way."""
    if not _SCHEME.fullmatch(f"{scheme}:"):
        raise ConfigError(f"{scheme!r} is no scheme of a URL")
    _factories[scheme] = factory


def schemes() -> list[str]:
    """The schemes there are."""
    return sorted(_factories)


def open_keeper(place: str | os.PathLike[str], **options: Any) -> Keeper:
    """A keeper: ``memory:``, a path, ``s3://bucket/prefix``, ``mooncake://host:port/prefix``.

    Args:
        place: a path or URL.
        **options: of the keeper: ``limit`` of memory; ``endpoint``, ``region``, ``credentials``,
            ``timeout`` and ``retries`` of S3; ``local``, ``protocol``, ``device``, ``segment``,
            ``replicas`` and ``timeout`` of Mooncake.

    Raises:
        ConfigError: no keeper is known for it, or it does not take such an option.
    """
    found = _SCHEME.match(place) if isinstance(place, str) else None
    if found is None:
        path = os.fspath(place)
        if not path:
            raise ConfigError("the place is empty; expected a path, or a URL such as s3://bucket/x")
        place, factory = Path(path).absolute().as_uri(), _folder
    elif found[1] in _factories:
        place, factory = str(place), _factories[found[1]]
    else:
        raise ConfigError(
            f"{place!r}: no keeper is known for {found[1]}:, but for {', '.join(schemes())}; a "
            f"folder of that name is ./{place}"
        )
    try:
        return factory(place, **options)
    except TypeError as error:
        if not options:
            raise
        raise ConfigError(f"{place!r} does not take {', '.join(options)}: {error}") from error
