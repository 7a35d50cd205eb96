"""Where a node's engine is found: also by a training that starts again while it still lives.

The socket is abstract, so nothing of it is left on disk whoever is killed. Its name follows from
user, node and the places of the tiers: the same checkpoints have the same engine. The kernel tells
each side the other's user; beyond that a rank must show the engine's token. Ranks of the group that
started the engine have it from the group's store, and those of a later group from a file that only
this user can read, which the engine keeps beside the checkpoints as long as it lives.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from sapwood.regular import open_regular
from sapwood.runtime.textfile import replace_text
from sapwood.tiers.spec import NodeMap, TierSpec

__all__ = ["Address", "find_address", "resolved"]

_FOLDERS = ("local", "external")


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """The name an engine listens at, and the file that holds its token."""

    name: str
    """Of the abstract socket, without the zero byte in front."""
    token_file: Path

    @property
    def socket(self) -> str:
        """As the kernel wants it."""
        return "\0" + self.name

    def read_token(self) -> str | None:
        """The token of the engine that lives, or lived, here; only from a file that is ours."""
        try:
            fd = open_regular(self.token_file, os.O_RDONLY | os.O_NOFOLLOW)
        except OSError:
            return None
        with os.fdopen(fd) as file:
            facts = os.fstat(fd)
            private = facts.st_uid == os.getuid() and not facts.st_mode & 0o077
            return file.read(256).strip() if private else None

    @property
    def token_there(self) -> bool:
        """Whether the file is where it was written."""
        return self.token_file.exists()

    def write_token(self, token: str) -> None:
        """Leave the token for a later group."""
        self.token_file.parent.mkdir(parents=True, exist_ok=True)
        replace_text(self.token_file, token, mode=0o600)

    def remove_token(self) -> None:
        """Take it away again, while the name is still taken: a later engine writes its own."""
        with suppress(OSError):
            self.token_file.unlink()


def resolved(specs: Sequence[TierSpec]) -> tuple[TierSpec, ...]:
    """The tiers with absolute folders: the engine has another current folder."""
    return tuple(spec.resolved() for spec in specs)


def find_address(specs: Sequence[TierSpec], nodes: NodeMap) -> Address:
    """The address of the engine of this node, for these (resolved) tiers."""
    places = sorted((s.kind, _place(s)) for s in specs)
    text = json.dumps([os.getuid(), nodes.node, places])
    mark = hashlib.blake2b(text.encode(), digest_size=12).hexdigest()
    return Address(
        name=f"sapwood-engine-{os.getuid()}-{mark}", token_file=_home(specs) / f".engine-{mark}"
    )


def _place(spec: TierSpec) -> str:
    """One repository may hold the checkpoints of several trainings at once."""
    return spec.place if spec.kind != "store" else json.dumps([spec.place, spec.name, spec.series])


def _home(specs: Sequence[TierSpec]) -> Path:
    for spec in specs:
        if spec.kind in _FOLDERS and spec.place:
            return Path(spec.place)
    return Path(tempfile.gettempdir()) / f"sapwood-{os.getuid()}"
