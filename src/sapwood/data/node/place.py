"""Which processes read together, and where they meet."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass, replace

from sapwood.runtime.launch import Launch

__all__ = ["Node"]


@dataclass(frozen=True, kw_only=True)
class Node:
    """This process among those of its host that belong to the same group."""

    members: int = 1
    local: int = 0
    """Which of them this is."""
    group: str = ""
    """Tells this group from any other on the host."""

    @classmethod
    def of(cls, launch: Launch) -> Node:
        """From what the launcher says."""
        facts = (launch.job, launch.address, launch.port, os.getuid())
        return cls(
            members=launch.local_world,
            local=launch.local_rank,
            group="|".join(str(one) for one in facts),
        )

    def at(self, *what: object) -> Node:
        """The same processes, meeting about one thing that all of them know."""
        return replace(self, group="|".join([self.group, *(str(one) for one in what)]))

    def address(self, leader: int) -> str:
        """Where the one that reads is found, if it is this member.

        It is a socket's name in the system's own space: no file, and gone with its process.
        """
        mark = hashlib.blake2b(f"{self.group}|{leader}".encode(), digest_size=16).hexdigest()
        return f"\0sapwood-data-{mark}"
