"""One connection of a client to a provider: requests are read, checked, allowed, and answered."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from sapwood.channel.connection import ChannelError, Connection
from sapwood.errors import ModelNotFound, SapwoodError, StoreError
from sapwood.repository.names import check_name, check_version
from sapwood.repository.providers.base import Part, StaleMembers, VersionKey
from sapwood.repository.providers.local import (
    LocalProvider,
    check_version_key,
    members_of_json,
    members_to_json,
)
from sapwood.repository.providers.rights import Rights
from sapwood.repository.providers.sending import map_part, send_part
from sapwood.repository.providers.taking import take_part
from sapwood.repository.providers.wire import (
    BODY_LIMIT,
    PROTOCOL,
    error_to_json,
    head_of,
    head_to_body,
    join,
    number,
    plain,
    receive_body,
    reference_of,
    send,
    text,
    version_of,
    version_to_json,
)
from sapwood.storage.memory import MemoryKeeper

__all__ = ["ALIVE_SECONDS", "Client", "Session"]

log = logging.getLogger(__name__)
IDLE_SECONDS = 600.0
"""A connection on which nothing is asked for so long is ended; the client opens another one."""
ALIVE_SECONDS = 2.0
"""Who waits for something that takes long is told so often that the provider lives."""
_EVERYWHERE = "*"
_MOST_KIN = 100_000
_MOST_BEGUN = 10_000
_LONGEST_PATTERN = 400
T = TypeVar("T")
Body = Sequence[bytes]


@dataclass(eq=False)
class Client:
    """A process that talks to a provider, through any number of connections."""

    name: str
    began: set[int] = field(default_factory=set)
    """Numbers of versions that it has put parts of: what fails it may drop again."""

    def begins(self, id: int) -> None:
        """It puts a part; of a client that goes on for long, only the last ones are known."""
        if len(self.began) >= _MOST_BEGUN:
            self.began.clear()
        self.began.add(id)


class Session:
    """Serves one connection, on one thread."""

    def __init__(
        self,
        provider: LocalProvider,
        connection: Connection,
        rights: Rights,
        unix: str,
        arrived: Callable[[str, str], Client],
    ) -> None:
        """``arrived`` is told which process it is, once the client has said so."""
        self.provider, self.connection, self.rights = provider, connection, rights
        self.client: Client | None = None
        self._unix, self._arrived = unix, arrived

    def serve(self) -> None:
        """Answer until the client leaves."""
        self.connection.allow_fds(1)
        while True:
            self._answer(self.connection.receive(timeout=IDLE_SECONDS))

    def _answer(self, message: Mapping[str, Any]) -> None:
        try:
            body = receive_body(self.connection, message, BODY_LIMIT)
            op = text(message, "op")
            if self.client is None and op != "hello":
                raise ChannelError("the first request is hello")
            handler = _HANDLERS.get(op)
            if handler is None:
                raise StoreError(f"{op!r} is no request of {PROTOCOL}"[:200])
            if op in _PLACED:
                self._check_epoch(message)
            handler(self, message, body)
        except SapwoodError as error:
            self.connection.send(error_to_json(error))
        except ChannelError as error:
            self.connection.send(error_to_json(StoreError(str(error))))
            raise  # what comes next is not a request
        except OSError:
            raise
        except Exception:
            # What is left of the request is unknown, so that this connection ends.
            log.exception("a request of %s failed", self.rights.owner)
            self.connection.send(
                error_to_json(StoreError("the provider failed; its log says more"))
            )
            raise

    def _check_epoch(self, message: Mapping[str, Any]) -> None:
        if message.get("epoch") is None:
            return
        members = self.provider.members()
        epoch = number(message, "epoch")
        if epoch < members.epoch:
            raise StaleMembers(
                f"the members of this repository are those of epoch {members.epoch}, not {epoch}",
                members,
            )

    # -- small helpers -----------------------------------------------------------------------

    def _ok(self, message: Mapping[str, Any] | None = None, body: bytes = b"") -> None:
        send(self.connection, {"ok": True, **(message or {})}, body)

    def _name(self, message: Mapping[str, Any], right: str) -> str:
        name = check_name(text(message, "name"))
        self.rights.check(right, name)
        return name

    def version(self, value: Any, right: str) -> VersionKey:
        """A version of a request, that there is a right to."""
        version = version_of(value)
        check_version_key(version)
        self.rights.check(right, version.name)
        return version

    def patiently(self, work: Callable[[Callable[[str], None]], T]) -> T:
        """Do what may take long, while the client is told that it goes on."""
        told: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        result: list[T] = []
        failure: list[BaseException] = []

        def run() -> None:
            try:
                result.append(work(told.put))
            except BaseException as error:
                failure.append(error)
            told.put(None)

        thread = threading.Thread(target=run, name="sapwood-provider-work", daemon=True)
        thread.start()
        try:
            while True:
                try:
                    line = told.get(timeout=ALIVE_SECONDS)
                except queue.Empty:
                    self.connection.send({"alive": True})
                    continue
                if line is None:
                    break
                self.connection.send({"said": line})
        finally:
            thread.join()
        if failure:
            raise failure[0]
        return result[0]

    # -- who is there ------------------------------------------------------------------------

    def hello(self, message: Mapping[str, Any], _: Body) -> None:
        if self.client is None:
            name = text(message, "client")
            if not 16 <= len(name) <= 64 or not name.isalnum():
                raise StoreError("a client names itself by 16 to 64 letters and digits")
            self.client = self._arrived(self.connection.key, name)
        keeper = self.provider.parts_here.backend.keeper
        self._ok(
            {
                "protocol": PROTOCOL,
                "name": self.provider.name,
                "unix": self._unix,
                "durability": int(self.provider.durability),
                "keeps": isinstance(keeper, MemoryKeeper),
            }
        )

    def members(self, _: Mapping[str, Any], __: Body) -> None:
        self._ok({"members": members_to_json(self.provider.members())})

    def take_members(self, message: Mapping[str, Any], _: Body) -> None:
        self.rights.check("admin", _EVERYWHERE)
        self.provider.take_members(members_of_json(text(message, "members")))
        self._ok()

    # -- bytes -------------------------------------------------------------------------------

    def put_part(self, message: Mapping[str, Any], body: Body) -> None:
        take_part(self, message, body)

    def read_part(self, message: Mapping[str, Any], body: Body) -> None:
        version = self.version(message.get("at"), "read")
        send_part(self.connection, self.provider, version, body)

    def map_part(self, message: Mapping[str, Any], body: Body) -> None:
        version = self.version(message.get("at"), "read")
        map_part(self.connection, self.provider, self.rights, version, body)

    def drop_part(self, message: Mapping[str, Any], body: Body) -> None:
        assert self.client is not None
        version = version_of(message.get("at"))
        mine = version.id in self.client.began and not self.provider.has_head(version)
        version = self.version(message.get("at"), "write" if mine else "delete")
        self.provider.drop_part(version, None if message.get("all") is True else body)
        self._ok()

    def parts(self, message: Mapping[str, Any], _: Body) -> None:
        after, limit = number(message, "after"), number(message, "limit", 1, 100_000)
        found: list[Part] = []
        while page := self.provider.parts(after, limit):
            found = [part for part in page if self.rights.allows("read", part.version.name)]
            after = page[-1].version.id
            if found:
                break
        rows = [[version_to_json(p.version), len(p.keys), p.nbytes, p.created] for p in found]
        keys = b"".join(key for part in found for key in part.keys)
        self._ok({"parts": rows}, join([keys]))

    # -- heads -------------------------------------------------------------------------------

    def reserve(self, message: Mapping[str, Any], _: Body) -> None:
        name = self._name(message, "write")
        version = None if message.get("version") is None else text(message, "version")
        found = self.provider.reserve_for(name, version, self.client)
        self._ok({"at": version_to_json(found)})

    def put_head(self, message: Mapping[str, Any], body: Body) -> None:
        head = head_of(body)
        self.rights.check("write", check_name(head.model.name))
        if head.model.parent_name is not None:
            check_name(head.model.parent_name)
        record = self.provider.put_head(head, synced=message.get("synced") is True)
        self._ok({"record": plain(record)})

    def head(self, message: Mapping[str, Any], _: Body) -> None:
        self._name(message, "read")
        with self._discreet():
            record, manifest, keys = self.provider.head(reference_of(message))
        self._ok({"record": plain(record)}, join([manifest.encode(), join(keys)]))

    def has_head(self, message: Mapping[str, Any], _: Body) -> None:
        self._ok({"has": self.provider.has_head(self.version(message.get("at"), "read"))})

    def remove_head(self, message: Mapping[str, Any], _: Body) -> None:
        version = version_of(message.get("at"))
        mine = self.provider.heads.reserved_by(version, self.client)
        self.version(message.get("at"), "write" if mine else "delete")
        with self._discreet():
            self.provider.remove_head(version)
        self._ok()

    def copy_head(self, message: Mapping[str, Any], _: Body) -> None:
        self.rights.check("admin", _EVERYWHERE)
        head = self.provider.copy_head(self.version(message.get("at"), "read"))
        self._ok(None, head_to_body(head))

    def drop_head(self, message: Mapping[str, Any], _: Body) -> None:
        self.rights.check("admin", _EVERYWHERE)
        self.provider.drop_head(self.version(message.get("at"), "delete"))
        self._ok()

    def find(self, message: Mapping[str, Any], _: Body) -> None:
        self._name(message, "read")
        with self._discreet():
            record = self.provider.find(reference_of(message))
        self._ok({"record": plain(record)})

    def models(self, message: Mapping[str, Any], _: Body) -> None:
        pattern = text(message, "pattern")
        if len(pattern) > _LONGEST_PATTERN:
            raise StoreError(f"a pattern has at most {_LONGEST_PATTERN} characters")
        self._records(self.provider.models(pattern))

    def by_id(self, message: Mapping[str, Any], _: Body) -> None:
        name = self._name(message, "read")
        with self._discreet():
            record = self.provider.by_id(number(message, "id"), name)
        self._ok({"record": plain(record)})

    def children(self, message: Mapping[str, Any], _: Body) -> None:
        self._records(self.provider.children(number(message, "id")))

    def _records(self, records: Sequence[Any]) -> None:
        allowed = [plain(one) for one in records if self.rights.allows("read", one.name)]
        self._ok({"records": allowed})

    def kin(self, message: Mapping[str, Any], body: Body) -> None:
        limit = number(message, "limit", 0, _MOST_KIN)
        by = None if message.get("by") is None else text(message, "by")
        lower = message.get("lower") is True
        # Of those it may not read, nobody knows how many come first.
        most = limit if self.rights.allows("read", _EVERYWHERE) else _MOST_KIN
        found = self.provider.kin(body, text(message, "pattern"), most, by, lower)
        mine = [plain(one) for one in found if self.rights.allows("read", one.record.name)]
        self._ok({"kin": mine[:limit]})

    def configs(self, _: Mapping[str, Any], body: Body) -> None:
        found = [
            data if data is not None and self._may_see(digest) else None
            for digest, data in zip(body, self.provider.configs(body), strict=True)
        ]
        there = bytes(data is not None for data in found)
        self._ok(None, join([there, *(data or b"" for data in found)]))

    def _may_see(self, digest: bytes) -> bool:
        if self.rights.allows("read", _EVERYWHERE):
            return True
        users = self.provider.heads.config_users(digest)
        return any(self.rights.allows("read", name) for name in users)

    def tag(self, message: Mapping[str, Any], _: Body) -> None:
        self._name(message, "write")
        tag = check_version(text(message, "tag"))
        with self._discreet():
            record = self.provider.tag(reference_of(message), tag)
        self._ok({"record": plain(record)})

    def untag(self, message: Mapping[str, Any], _: Body) -> None:
        name = self._name(message, "write")
        self.provider.untag(name, text(message, "tag"))
        self._ok()

    def _discreet(self) -> _Discreet:
        return _Discreet(self.rights)

    # -- care --------------------------------------------------------------------------------

    def gc(self, message: Mapping[str, Any], _: Body) -> None:
        self.rights.check("admin", _EVERYWHERE)
        quiet = message.get("quiet")
        if not isinstance(quiet, int | float) or not 0 <= quiet < 1e9:
            raise StoreError("quiet is a number of seconds")
        swept = self.patiently(lambda said: self.provider.gc(quiet=quiet, said=said))
        self._ok({"swept": plain(swept)})

    def verify(self, _: Mapping[str, Any], __: Body) -> None:
        self.rights.check("admin", _EVERYWHERE)
        found = self.patiently(lambda said: self.provider.verify(said=said))
        self._ok({"verified": plain(found)})

    def flush(self, _: Mapping[str, Any], __: Body) -> None:
        self.patiently(lambda _: self.provider.flush())
        self._ok()


class _Discreet:
    """Says which names are alike only to who may read all of them."""

    def __init__(self, rights: Rights) -> None:
        self._rights = rights

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, ModelNotFound) and not self._rights.allows("read", _EVERYWHERE):
            raise ModelNotFound(str(error).partition("; did you mean")[0]) from None


_Handler = Callable[[Session, Mapping[str, Any], Body], None]
_PLACED = {
    "put_part", "read_part", "map_part", "reserve", "put_head", "head", "has_head", "remove_head",
    "find", "models", "by_id", "children", "kin", "configs", "tag", "untag",
}  # fmt: skip
"""Requests that a client sends here because of its list of members."""
_HANDLERS: Mapping[str, _Handler] = {
    name: getattr(Session, name)
    for name in (*sorted(_PLACED), "hello", "members", "take_members", "drop_part", "parts", "gc",
                 "copy_head", "drop_head",
                 "verify", "flush")
}  # fmt: skip
