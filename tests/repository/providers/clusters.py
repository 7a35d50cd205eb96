"""Clusters of providers in this process, which can be made silent and counted."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sapwood.errors import Unreachable
from sapwood.repository.providers.base import (
    Member,
    Members,
    Provider,
    StaleMembers,
)
from sapwood.repository.providers.cluster import ClusterBackend
from sapwood.repository.providers.local import LocalProvider, open_provider
from sapwood.storage import Durability
from sapwood.store import Repository

UNCHECKED = ("address", "close", "members", "take_members")


class Asked:
    """One client's way to a provider, as a server would check it."""

    def __init__(self, node: Node, epoch: Callable[[], int]) -> None:
        self._node, self._epoch = node, epoch

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._node.provider, name)
        if not callable(value):
            return value

        def call(*args: Any, **more: Any) -> Any:
            node = self._node
            node.calls[name] += 1
            if node.before is not None:
                node.before(name)
            if node.dead or name in node.dead_for:
                raise Unreachable("connection refused")
            here = node.provider.members()
            if name not in UNCHECKED and self._epoch() < here.epoch:
                raise StaleMembers(f"the list is of epoch {here.epoch}", here)
            if name == "put_part":
                node.count(args[1])
            answer = value(*args, **more)
            if name in node.lost_answers:
                raise Unreachable("connection reset")
            return answer

        return call

    def close(self) -> None:
        pass


class Node:
    """A provider, and what is done to it."""

    def __init__(self, member: Member, place: Path | None) -> None:
        self.member, self.place = member, place
        self.dead = False
        self.dead_for: set[str] = set()
        self.lost_answers: set[str] = set()
        self.before: Callable[[str], None] | None = None
        self.calls: Counter[str] = Counter()
        self.sent = 0
        self._lock = threading.Lock()
        self.provider = self._open()

    def _open(self) -> LocalProvider:
        where = "memory:" if self.place is None else self.place
        return open_provider(where, name=self.member.name, address=self.member.address)

    def count(self, sources: Sequence[memoryview | None]) -> None:
        with self._lock:
            self.sent += sum(len(source) for source in sources if source is not None)

    def restart(self) -> None:
        self.provider.close()
        self.provider = self._open()
        self.dead = False


class Cluster:
    """Some providers with one list of members."""

    def __init__(
        self, count: int, *, replicas: int = 1, placement: str = "content", root: Path | None = None
    ) -> None:
        self.root = root
        self.nodes: dict[str, Node] = {}
        for number in range(count):
            self.add(number)
        self.members = Members(
            epoch=1,
            members=tuple(node.member for node in self.nodes.values()),
            replicas=replicas,
            placement=placement,
        )
        for node in self.nodes.values():
            node.provider.take_members(self.members)

    def add(self, number: int) -> Node:
        member = Member(f"p{number}", f"here:{number}")
        place = None if self.root is None else self.root / member.name
        self.nodes[member.name] = Node(member, place)
        return self.nodes[member.name]

    def connect(self, member: Member, epoch: Callable[[], int]) -> Provider:
        return Asked(self.nodes[member.name], epoch)  # type: ignore[return-value]

    def backend(self, members: Members | None = None) -> ClusterBackend:
        return ClusterBackend("cluster", members or self.members, self.connect)

    @contextmanager
    def repository(self, **more: Any) -> Any:
        with Repository(self.backend(**more), durability=self.durability) as repository:
            yield repository

    @property
    def durability(self) -> Durability:
        return Durability.MEMORY if self.root is None else Durability.WRITTEN

    def parts(self) -> dict[str, set[tuple[str, bytes]]]:
        """Which tensors each provider has, by version and key."""
        return {
            name: {
                (f"{part.version.name}@{part.version.version}", key)
                for part in node.provider.parts(0, 10**6)
                for key in part.keys
            }
            for name, node in self.nodes.items()
        }

    def heads(self) -> dict[str, set[str]]:
        return {
            name: {str(record.reference) for record in node.provider.models("*")}
            for name, node in self.nodes.items()
        }

    def close(self) -> None:
        for node in self.nodes.values():
            node.provider.close()
