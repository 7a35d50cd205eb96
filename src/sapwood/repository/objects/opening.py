"""Whether a place is a repository of objects, and making it one."""

from __future__ import annotations

from collections.abc import Callable

from sapwood.errors import AlreadyThere, ConfigError, NotFound, StoreError
from sapwood.repository.objects.backend import ObjectBackend
from sapwood.repository.objects.layout import FORMAT, MARKER, framed_json, parse_json
from sapwood.storage import Durability, Keeper

__all__ = ["is_repository", "open_objects"]

_KIND = b"RP"


def open_objects(
    keeper: Keeper, name: str, *, create: bool, reopen: Callable[[], Keeper] | None = None
) -> ObjectBackend:
    """Open the repository in a place, or make it; the keeper is the back end's to close then.

    Raises:
        ConfigError: there is none and none is to be made, or the place holds something else.
        StoreError: it is of a newer version.
        Damaged: what says what it is is damaged.
    """
    if not is_repository(keeper):
        if not create:
            raise ConfigError(
                f"there is no repository in {name}; make one with `sapwood store put`, or in "
                "Python with create=True"
            )
        if next(keeper.list(), None) is not None and not is_repository(keeper):
            raise ConfigError(
                f"{name} holds something else; name a place that is empty or not there"
            )
        try:
            safest = min(Durability.SYNCED, keeper.durability)
            keeper.put(MARKER, [framed_json(_KIND, {"format": FORMAT})], durability=safest)
        except AlreadyThere:
            _check(keeper, name)  # somebody else has made it just now
    return ObjectBackend(name, keeper, reopen=reopen)


def is_repository(keeper: Keeper) -> bool:
    """Whether it is one, of a version that is known.

    Raises:
        StoreError: of a newer version.
        Damaged: what says so is damaged.
    """
    try:
        _check(keeper, "the place")
    except NotFound:
        return False
    return True


def _check(keeper: Keeper, name: str) -> None:
    found = parse_json(_KIND, keeper.get(MARKER), MARKER).get("format")
    if found != FORMAT:
        raise StoreError(
            f"{name} is a repository of objects in format {found}, this Sapwood knows {FORMAT}: "
            "use a newer version of Sapwood"
        )
