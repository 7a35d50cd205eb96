"""A provider in another process, on this machine or elsewhere."""

from __future__ import annotations

import os
import ssl
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from sapwood.buffers import HandoverPool
from sapwood.buffers.copying import copy_ranges
from sapwood.buffers.handover import copy_to
from sapwood.buffers.mapping import Access
from sapwood.buffers.mapping import Mapping as MappedMemory
from sapwood.channel.connection import ChannelError
from sapwood.errors import Damaged, StoreError
from sapwood.repository.base import Kin, ModelRecord
from sapwood.repository.manifest import Manifest
from sapwood.repository.names import Reference, check_name, check_version
from sapwood.repository.packs import lay_out, pieces
from sapwood.repository.providers.base import (
    Head,
    Members,
    NewPart,
    Part,
    PartRange,
    VersionKey,
)
from sapwood.repository.providers.link import Exchange, Link
from sapwood.repository.providers.local import members_of_json, members_to_json
from sapwood.repository.providers.parts import size_of
from sapwood.repository.providers.placement import KEY_BYTES
from sapwood.repository.providers.sending import MAPPED
from sapwood.repository.providers.taking import part_to_body
from sapwood.repository.providers.wire import (
    head_of,
    head_to_body,
    join,
    kin_of,
    made,
    numbers_of,
    record_of,
    split,
    table,
    version_of,
    version_to_json,
)
from sapwood.repository.sweeping import Swept
from sapwood.repository.verifying import Verified
from sapwood.storage import Durability

__all__ = ["RemoteProvider"]

_PASSED = 256 * 2**10
"""From so many bytes on, memory is passed rather than sent through a local socket."""


class RemoteProvider:
    """Fulfils ``Provider`` through connections. Thread-safe; a forked child connects anew.

    Owns its connections, and memory for saves to a provider on this machine; close it.

    Args:
        address: ``host:port``.
        token: decides what it may do.
        name: the provider's, where it is known; another one's answer is refused.
        timeout: seconds without a sign of life after which it is ``Unreachable``.
        tls: encrypts and checks its certificate (``channel.tls.client_context``).
        local: whether to pass shared memory; None does where the provider is on this machine.
        staging: ``preallocated`` keeps memory ready for the next save; ``on_demand`` does not.
    """

    def __init__(
        self,
        address: str,
        token: str,
        *,
        name: str | None = None,
        timeout: float = 30.0,
        tls: ssl.SSLContext | None = None,
        local: bool | None = None,
        staging: str = "preallocated",
    ) -> None:
        """Nothing is connected before the first call."""
        self.epoch: int | None = None
        """Of the list of members that its user goes by; None leaves it unchecked."""
        self._link = Link(address, token, name=name, timeout=timeout, tls=tls, local=local)
        self._staging = staging
        self._memory: HandoverPool | None = None
        self._pid = os.getpid()

    @property
    def address(self) -> str:
        """``host:port``."""
        return self._link.address

    @property
    def durability(self) -> Durability:
        """The most it can promise by itself.

        Raises:
            Unreachable: it cannot be reached.
        """
        return self._link.about().durability

    def _ask(
        self,
        op: str,
        message: Mapping[str, Any] | None = None,
        body: bytes = b"",
        *,
        said: Callable[[str], None] = lambda _: None,
    ) -> tuple[dict[str, Any], list[bytes]]:
        with self._link.exchange() as exchange:
            return exchange.ask(self._request(op, message), body, said=said)

    def _request(self, op: str, message: Mapping[str, Any] | None = None) -> dict[str, Any]:
        return {"op": op, "epoch": self.epoch, **(message or {})}

    # -- who is there ------------------------------------------------------------------------

    def members(self) -> Members:
        """Its list."""
        return members_of_json(self._ask("members")[0]["members"])

    def take_members(self, members: Members) -> None:
        """Needs the right ``admin`` to all models."""
        self._ask("take_members", {"members": members_to_json(members)})

    # -- bytes -------------------------------------------------------------------------------

    def put_part(
        self, part: NewPart, sources: Sequence[memoryview | None], durability: Durability
    ) -> list[int]:
        """Pass memory to a provider on this machine, else send buffers as they are."""
        _check_sources(part, sources)
        body, versions = part_to_body(part)
        to_send = sum(source.nbytes for source in sources if source is not None)
        with self._link.exchange() as exchange:
            sealed = exchange.local and to_send >= _PASSED
            request = self._request(
                "put_part",
                {
                    "at": version_to_json(part.version),
                    "same_as": versions,
                    "durability": int(durability),
                    "sealed": sealed,
                },
            )
            answer, found = exchange.ask(request, body)
            if "refused" in answer:
                return _indices(found)
            wanted = _indices(found)
            self._send(exchange, part, [sources[i] for i in wanted], wanted, sealed=sealed)
            return _indices(exchange.answer()[1])

    def _send(
        self,
        exchange: Exchange,
        part: NewPart,
        sources: Sequence[memoryview | None],
        wanted: Sequence[int],
        *,
        sealed: bool,
    ) -> None:
        if not wanted:
            return
        buffers = [source.cast("B") for source in sources if source is not None]
        if len(buffers) != len(wanted):
            raise ChannelError("it wants bytes of tensors that it was told not to want")
        starts, nbytes = lay_out([len(buffer) for buffer in buffers])
        if not sealed:
            exchange.connection.send_gathered(list(pieces(starts, buffers)))
            return
        fd = self._packed(starts, buffers, nbytes)
        try:
            exchange.connection.send({"sealed": nbytes}, [fd])
        finally:
            os.close(fd)

    def _packed(self, starts: Sequence[int], buffers: Sequence[memoryview], nbytes: int) -> int:
        """Sealed memory with all of them; its descriptor."""
        if self._memory is None or self._pid != os.getpid():
            self._memory, self._pid = HandoverPool(policy=self._staging), os.getpid()
        with self._memory.take(nbytes) as memory:
            copy_to(memory, starts, buffers)
            return memory.seal()

    def read_part(self, version: VersionKey, ranges: Sequence[PartRange]) -> list[int]:
        """One request; bytes go straight into the buffers."""
        total = sum(one.out.nbytes for one in ranges)
        if any(one.start < 0 or one.start + one.out.nbytes > size_of(one.key) for one in ranges):
            raise Damaged(f"{version.name}@{version.version}: a range is beyond its tensor")
        if total >= _PASSED and (missing := self._copied(version, ranges)) is not None:
            return missing
        rows = table((one.key, one.start, one.out.nbytes) for one in ranges)
        with self._link.exchange() as exchange:
            request = self._request("read_part", {"at": version_to_json(version)})
            answer, found = exchange.ask(request, join([rows]))
            missing = _indices(found)
            away = set(missing)
            outs = [one.out for index, one in enumerate(ranges) if index not in away]
            if answer.get("nbytes") != sum(out.nbytes for out in outs):
                raise ChannelError("it answers with another number of bytes than it was asked for")
            exchange.connection.receive_scattered(outs)
        return missing

    def _copied(self, version: VersionKey, ranges: Sequence[PartRange]) -> list[int] | None:
        """Copy from the provider's memory; None where that cannot be had."""
        keys = list(dict.fromkeys(one.key for one in ranges))
        mapped = self._mapped(version, keys, Access.READ)
        if mapped is None:
            return None
        moves, missing = [], []
        for index, one in enumerate(ranges):
            if one.key not in mapped:
                missing.append(index)
            elif one.out.nbytes:
                source = np.frombuffer(mapped[one.key], np.uint8)
                target = np.frombuffer(one.out, np.uint8)
                moves.append((_address(target), _address(source) + one.start, target.nbytes))
        copy_ranges(moves)
        return missing

    def map_part(
        self, version: VersionKey, keys: Sequence[bytes]
    ) -> Mapping[bytes, memoryview] | None:
        """The provider's memory, copy-on-write; None over TCP."""
        return self._mapped(version, keys, Access.COPY)

    def _mapped(
        self, version: VersionKey, keys: Sequence[bytes], access: Access
    ) -> dict[bytes, memoryview] | None:
        if any(len(key) != KEY_BYTES for key in keys):
            raise StoreError(f"{version.name}@{version.version}: a key is none")
        with self._link.exchange() as exchange:
            if not exchange.local:
                return None
            request = self._request("map_part", {"at": version_to_json(version)})
            answer, found = exchange.ask(request, join([b"".join(keys)]))
            fds = exchange.connection.take_fds()
            try:
                if answer.get("mapped") is not True:
                    return None
                if len(fds) != answer.get("files"):
                    raise ChannelError("descriptors got lost on the way; is ulimit -n too low?")
                files = [_memory(fd, access) for fd in fds]
            finally:
                for fd in fds:
                    os.close(fd)
        return _parts_of(files, keys, found)

    def drop_part(self, version: VersionKey, keys: Sequence[bytes] | None = None) -> None:
        """Needs the right ``delete``, but for what this client has put and not made a head of."""
        message = {"at": version_to_json(version), "all": keys is None}
        self._ask("drop_part", message, join(list(keys or [])))

    def parts(self, after: int = 0, limit: int = 1000) -> Sequence[Part]:
        """Those of models that the token may read."""
        answer, (keys,) = self._ask("parts", {"after": after, "limit": limit})
        found, at = [], 0
        for at_version, count, nbytes, created in answer["parts"]:
            end = at + count * KEY_BYTES
            mine = tuple(keys[i : i + KEY_BYTES] for i in range(at, end, KEY_BYTES))
            found.append(Part(version_of(at_version), mine, nbytes, created))
            at = end
        return found

    # -- heads -------------------------------------------------------------------------------

    def reserve(self, name: str, version: str | None) -> VersionKey:
        """As long as this process has a connection, ten minutes at most."""
        check_name(name)
        if version is not None:
            check_version(version)
        return version_of(self._ask("reserve", {"name": name, "version": version})[0]["at"])

    def put_head(self, head: Head, *, synced: bool) -> ModelRecord:
        """Make a version be there."""
        return self._record("put_head", {"synced": synced}, head_to_body(head))

    def head(self, reference: Reference) -> tuple[ModelRecord, Manifest, tuple[bytes, ...]]:
        """A version, its manifest and its tensors' keys."""
        answer, (manifest, keys) = self._ask("head", _named(reference))
        return record_of(answer["record"]), Manifest.decode(manifest), tuple(split(keys))

    def has_head(self, version: VersionKey) -> bool:
        """Whether a version is there, under this number."""
        return self._ask("has_head", {"at": version_to_json(version)})[0]["has"] is True

    def remove_head(self, version: VersionKey) -> None:
        """Needs the right ``delete``, but for what this process has reserved."""
        self._ask("remove_head", {"at": version_to_json(version)})

    def copy_head(self, version: VersionKey) -> Head:
        """Needs the right ``admin`` to all models."""
        return head_of(self._ask("copy_head", {"at": version_to_json(version)})[1])

    def drop_head(self, version: VersionKey) -> None:
        """Needs the right ``admin`` to all models."""
        self._ask("drop_head", {"at": version_to_json(version)})

    def find(self, reference: Reference) -> ModelRecord:
        """As its catalog has it."""
        return self._record("find", _named(reference))

    def models(self, pattern: str) -> Sequence[ModelRecord]:
        """Those that the token may read."""
        return self._records("models", {"pattern": pattern})

    def by_id(self, id: int, name: str) -> ModelRecord:
        """As its catalog has it."""
        return self._record("by_id", {"id": id, "name": name})

    def children(self, id: int) -> Sequence[ModelRecord]:
        """Those that the token may read."""
        return self._records("children", {"id": id})

    def kin(
        self, layers: Sequence[bytes], pattern: str, limit: int, by: str | None, lower: bool
    ) -> Sequence[Kin]:
        """Of those that the token may read."""
        message = {"pattern": pattern, "limit": limit, "by": by, "lower": lower}
        answer, _ = self._ask("kin", message, join(list(layers)))
        return [kin_of(one) for one in answer["kin"]]

    def configs(self, digests: Sequence[bytes]) -> list[bytes | None]:
        """Those that came with a model that the token may read."""
        _, (there, *found) = self._ask("configs", None, join(list(digests)))
        return [data if here else None for here, data in zip(there, found, strict=True)]

    def tag(self, reference: Reference, tag: str) -> ModelRecord:
        """Needs the right ``write``."""
        return self._record("tag", {**_named(reference), "tag": check_version(tag)})

    def untag(self, name: str, tag: str) -> None:
        """Needs the right ``write``."""
        self._ask("untag", {"name": name, "tag": tag})

    def _record(self, op: str, message: Mapping[str, Any], body: bytes = b"") -> ModelRecord:
        return record_of(self._ask(op, message, body)[0]["record"])

    def _records(self, op: str, message: Mapping[str, Any]) -> list[ModelRecord]:
        return [record_of(one) for one in self._ask(op, message)[0]["records"]]

    # -- care --------------------------------------------------------------------------------

    def gc(self, *, quiet: float, said: Callable[[str], None]) -> Swept:
        """Needs the right ``admin`` to all models."""
        return made(Swept, self._ask("gc", {"quiet": quiet}, said=said)[0]["swept"])

    def verify(self, *, said: Callable[[str], None]) -> Verified:
        """Needs the right ``admin`` to all models."""
        return made(Verified, self._ask("verify", said=said)[0]["verified"])

    def flush(self) -> None:
        """Wait until what was put is hashed and merged there."""
        self._ask("flush")

    def close(self) -> None:
        """End the connections, and give back memory."""
        self._link.close()
        memory, self._memory = self._memory, None
        if memory is not None and self._pid == os.getpid():
            memory.close()


def _check_sources(part: NewPart, sources: Sequence[memoryview | None]) -> None:
    """Before anything is sent: the provider counts on what keys say."""
    if len(sources) != len(part.keys):
        raise StoreError(f"{len(sources)} sources for {len(part.keys)} keys of a part")
    for index, (key, source) in enumerate(zip(part.keys, sources, strict=True)):
        if (source is None) != (index in part.same_as) or len(key) != KEY_BYTES:
            raise StoreError(
                f"{part.version.name}@{part.version.version}: source {index} is sent, or the same "
                "as another one, and has a key of placement.key_of"
            )
        if source is not None and source.nbytes != size_of(key):
            raise StoreError(
                f"{part.version.name}@{part.version.version}: source {index} is not of the size "
                "that its key says"
            )


def _named(reference: Reference) -> dict[str, Any]:
    return {"name": reference.name, "version": reference.version}


def _indices(body: Sequence[bytes]) -> list[int]:
    return [int(n) for n in numbers_of(body[0])] if body else []


def _address(array: np.ndarray[Any, Any]) -> int:
    return int(array.__array_interface__["data"][0])


def _memory(fd: int, access: Access) -> memoryview:
    """What was passed, mapped: sealed memory, or a file, which a provider never makes shorter."""
    nbytes = os.fstat(fd).st_size
    return MappedMemory(fd, nbytes, access).bytes.data


def _parts_of(
    files: Sequence[memoryview], keys: Sequence[bytes], found: Sequence[bytes]
) -> dict[bytes, memoryview]:
    rows = numbers_of(found[0], MAPPED) if found else np.empty(0, MAPPED)  # type: ignore[arg-type]
    result = {}
    for index, file, start in rows.tolist():
        if index >= len(keys) or file >= len(files):
            raise ChannelError("it answers with tensors that it was not asked for")
        end = start + size_of(keys[index])
        if end > len(files[file]):
            raise ChannelError("it answers with memory that ends before a tensor does")
        result[keys[index]] = files[file][start:end]
    return result
