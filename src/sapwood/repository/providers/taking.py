"""The provider's side of ``put_part``: what may come is settled before any of it does."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from sapwood.buffers.handover import is_sealed
from sapwood.buffers.mapping import Access
from sapwood.buffers.mapping import Mapping as MappedMemory
from sapwood.channel.connection import ChannelError, Connection
from sapwood.errors import NoRoom, StorageError, StoreError
from sapwood.repository.providers.base import NewPart, VersionKey
from sapwood.repository.providers.parts import PartPlan
from sapwood.repository.providers.placement import KEY_BYTES
from sapwood.repository.providers.wire import (
    join,
    number,
    numbers_of,
    send,
    version_to_json,
)
from sapwood.storage import Draft, Durability, Keeper
from sapwood.storage.folder import FolderKeeper
from sapwood.storage.memory import MemoryKeeper

if TYPE_CHECKING:
    from sapwood.repository.providers.session import Session

__all__ = ["part_of", "part_to_body", "take_part"]

_BLOCK = 4 * 2**20
"""Bytes on their way to a file: few enough that they stay in the processor's cache."""
_LONG = 64 * 2**20
"""From so many bytes on, publishing may take longer than a client waits for a sign of life."""


def part_to_body(part: NewPart) -> tuple[bytes, list[Any]]:
    """Keys and proofs of a part as a body, and the versions they are of."""
    versions = list(dict.fromkeys(version for version, _ in part.same_as.values()))
    place = {version: n for n, version in enumerate(versions)}
    which = [place[version] for version, _ in part.same_as.values()]
    body = join(
        [
            b"".join(part.keys),
            np.array(list(part.same_as), "<u4").tobytes(),
            np.array(which, "<u4").tobytes(),
            *(digest for _, digest in part.same_as.values()),
        ]
    )
    return body, [version_to_json(version) for version in versions]


def part_of(version: VersionKey, body: Sequence[bytes], versions: Sequence[VersionKey]) -> NewPart:
    """The reverse.

    Raises:
        StoreError: it is not well formed.
    """
    if len(body) < 3 or len(body[0]) % KEY_BYTES:
        raise StoreError("a part has keys, and tables of what is not sent")
    keys = tuple(body[0][at : at + KEY_BYTES] for at in range(0, len(body[0]), KEY_BYTES))
    indices, which, digests = numbers_of(body[1]).tolist(), numbers_of(body[2]).tolist(), body[3:]
    if len(indices) != len(which) or len(which) != len(digests):
        raise StoreError("tables of what is not sent differ in length")
    if any(i >= len(keys) for i in indices) or any(n >= len(versions) for n in which):
        raise StoreError("a table of what is not sent refers to nothing")
    same_as = {
        index: (versions[n], digest)
        for index, n, digest in zip(indices, which, digests, strict=True)
    }
    return NewPart(version=version, keys=keys, same_as=same_as)


def take_part(session: Session, message: Mapping[str, Any], body: Sequence[bytes]) -> None:
    """Say what must be sent of a part, take that, and keep it."""
    version = session.version(message.get("at"), "write")
    others = message.get("same_as", [])
    if not isinstance(others, list):
        raise StoreError("same_as is a list of versions")
    versions = [session.version(one, "read") for one in others]
    durability = Durability(number(message, "durability", 0, int(max(Durability))))
    provider, connection = session.provider, session.connection
    plan = provider.plan_part(part_of(version, body, versions), durability)
    if plan.refused:
        _say(connection, "refused", plan.refused)
        return
    assert session.client is not None
    session.client.begins(version.id)
    promised = provider.level(durability)
    keeper = provider.parts_here.backend.keeper

    def keep(write: Callable[[PartPlan], None]) -> list[int]:
        def work() -> list[int]:
            return provider.parts_here.put(plan, write, promised)

        return session.patiently(lambda _: work()) if plan.nbytes >= _LONG else work()

    if not plan.wanted:
        _say(connection, "wanted", ())
        refused = keep(lambda _: None)
    elif message.get("sealed") is True:
        _check_room(keeper, plan)
        _say(connection, "wanted", plan.wanted)
        refused = _take_sealed(connection, keeper, plan, promised, keep)
    else:
        _check_room(keeper, plan)
        with keeper.begin(plan.key, plan.nbytes, durability=promised) as draft:
            _take_bytes(connection, draft, plan)
            refused = keep(lambda _: draft.publish())
    _say(connection, "refused", refused)


def _say(connection: Connection, what: str, indices: Sequence[int]) -> None:
    send(connection, {what: len(indices)}, join([np.array(indices, "<u4").tobytes()]))


def _check_room(keeper: Keeper, plan: PartPlan) -> None:
    """Before anything is sent, and before any memory is taken.

    Raises:
        NoRoom: it does not fit.
    """
    if isinstance(keeper, MemoryKeeper):
        keeper.reserve(plan.key, plan.nbytes)
        keeper.release(plan.nbytes)
    elif isinstance(keeper, FolderKeeper):
        free = shutil.disk_usage(keeper.folder).free
        if plan.nbytes > free:
            raise NoRoom(
                f"{plan.nbytes} bytes do not fit: {keeper.folder} has {free} left; make room there"
            )


def _take_bytes(connection: Connection, draft: Draft, plan: PartPlan) -> None:
    """Receive a pack as it will lie."""
    direct = getattr(draft, "direct", lambda: None)()
    _say(connection, "wanted", plan.wanted)
    if direct is not None:
        connection.receive_into(direct)
        return
    block = memoryview(bytearray(min(_BLOCK, plan.nbytes)))
    left = plan.nbytes
    try:
        while left:
            some = block[: min(left, _BLOCK)]
            connection.receive_into(some)
            left -= len(some)
            draft.write(some)
    except StorageError:
        # The client hears of it when all is sent; it would not listen before.
        while left:
            some = block[: min(left, _BLOCK)]
            connection.receive_into(some)
            left -= len(some)
        raise


def _take_sealed(
    connection: Connection,
    keeper: Keeper,
    plan: PartPlan,
    promised: Durability,
    keep: Callable[[Callable[[PartPlan], None]], list[int]],
) -> list[int]:
    """Receive a descriptor of memory in which the pack lies, and that nobody can change."""
    connection.receive()
    fds = connection.take_fds()
    if len(fds) != 1:
        for fd in fds:
            os.close(fd)
        raise ChannelError("no descriptor came with a part that is sealed")
    (fd,) = fds
    if not is_sealed(fd) or os.fstat(fd).st_size != plan.nbytes:
        os.close(fd)
        raise StoreError(f"what was passed is not {plan.nbytes} bytes of sealed memory")
    if isinstance(keeper, MemoryKeeper):
        return keep(lambda plan: keeper.keep(plan.key, fd))
    try:
        mapped = MappedMemory(fd, plan.nbytes, Access.READ)
    finally:
        os.close(fd)
    with keeper.begin(plan.key, plan.nbytes, durability=promised) as draft:

        def write(_: PartPlan) -> None:
            draft.write_parts(_blocks(mapped.bytes.data))
            draft.publish()

        return keep(write)


def _blocks(data: memoryview) -> Iterator[memoryview]:
    for at in range(0, len(data), _BLOCK):
        yield data[at : at + _BLOCK]
