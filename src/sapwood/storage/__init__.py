"""Where bytes rest: objects under keys, in memory, in a folder, in S3."""

from sapwood.storage.base import (
    Adopting,
    Descriptor,
    Draft,
    Durability,
    Entry,
    Keeper,
    Linkable,
    Mappable,
    Pending,
    Shareable,
    Wanted,
)
from sapwood.storage.keys import checked_key, is_key
from sapwood.storage.mapped import Mapped
from sapwood.storage.opening import open_keeper, register

__all__ = [
    "Adopting",
    "Descriptor",
    "Draft",
    "Durability",
    "Entry",
    "Keeper",
    "Linkable",
    "Mappable",
    "Mapped",
    "Pending",
    "Shareable",
    "Wanted",
    "checked_key",
    "is_key",
    "open_keeper",
    "register",
]
