"""Opening the back end of a repository without torch, as an engine of checkpoints does."""

from __future__ import annotations

from sapwood.errors import ConfigError
from sapwood.repository.base import Backend
from sapwood.repository.folder import open_folder
from sapwood.storage import Durability, open_keeper
from sapwood.storage.folder import FolderKeeper

__all__ = ["is_folder", "open_backend"]


def is_folder(place: str) -> bool:
    """Whether a repository is embedded: a folder, which one machine writes to."""
    return bool(place) and "://" not in place and place != "memory:"


def open_backend(place: str, *, create: bool) -> tuple[Backend, Durability]:
    """The back end at a place, and the most it can promise.

    Raises:
        ConfigError: there is none, or none can be there.
        StoreError: it cannot be opened.
    """
    if not is_folder(place):
        raise ConfigError(f"{place!r} cannot hold checkpoints; expected the folder of a repository")
    keeper = open_keeper(place)
    assert isinstance(keeper, FolderKeeper)
    return open_folder(keeper, place, create=create), keeper.durability
