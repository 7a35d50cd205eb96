"""A provider as a program: ``sapwood store serve``, from its settings to its end."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import resource
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from sapwood.buffers.available import available_memory
from sapwood.channel.handshake import key_of
from sapwood.channel.listener import bind_tcp
from sapwood.channel.tls import server_context
from sapwood.errors import ConfigError
from sapwood.repository.names import check_version
from sapwood.repository.providers.base import Member, Members
from sapwood.repository.providers.link import split_address
from sapwood.repository.providers.local import open_provider
from sapwood.repository.providers.rights import Rights, load_rights, owner_rights
from sapwood.repository.providers.server import ProviderServer
from sapwood.runtime.tokens import read_or_make_token

__all__ = ["DEFAULT_LISTEN", "ServeSettings", "Served", "parse_members", "parse_size"]

log = logging.getLogger(__name__)
DEFAULT_LISTEN = "127.0.0.1:7070"
_TOKEN_FILE = "provider.token"  # noqa: S105 - a name of a file
_EVERYWHERE = ("0.0.0.0", "::")  # noqa: S104 - refused unless somebody says what it is called
_LOOPBACK = ("127.", "::1", "localhost")
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kMGT]?)(i?)B?", re.IGNORECASE)
_MEMORY_SHARE = 0.5


@dataclass(frozen=True, kw_only=True)
class ServeSettings:
    """What a provider serves, where, and to whom."""

    place: str
    """A folder, or ``memory:``."""
    listen: str = DEFAULT_LISTEN
    """``host:port``; port 0 takes a free one."""
    name: str = "p0"
    advertise: str | None = None
    """``host:port`` as others must dial it, if that is not ``listen``."""
    token_file: Path | None = None
    """Of the token with every right; made if it is not there."""
    rights: Path | None = None
    """A file with other tokens and their rights; see ``rights``."""
    members: str | None = None
    """``p0=host:port,p1=...``, if it is one of several."""
    replicas: int = 1
    placement: str = "content"
    """What decides where tensors are; see ``base.Members``."""
    memory: int | None = None
    """Bytes that ``memory:`` may take; by default half of what the machine has left."""
    staging: str = "preallocated"
    tls_cert: Path | None = None
    tls_key: Path | None = None


class Served:
    """A provider that serves until it is closed. Owns the provider and its server."""

    def __init__(self, settings: ServeSettings) -> None:
        """Begin to serve.

        Raises:
            ConfigError: a setting is wrong, or the address or the place is in use.
            StoreError: the place cannot be opened.
        """
        _check(settings)
        _raise_limits()
        tls = None
        if settings.tls_cert is not None and settings.tls_key is not None:
            tls = server_context(settings.tls_cert, settings.tls_key)
        host, _, port = settings.listen.rpartition(":")
        host = host.removeprefix("[").removesuffix("]")
        with contextlib.ExitStack() as stack:
            sock = stack.enter_context(bind_tcp(host, int(port)))
            self.address = _reachable(settings.advertise, host, sock.getsockname()[1])
            memory = settings.memory
            if settings.place == "memory:" and memory is None:
                memory = int(available_memory() * _MEMORY_SHARE)
            self.provider = open_provider(
                settings.place,
                name=settings.name,
                address=self.address,
                members=_members(settings, self.address),
                memory=memory,
                staging=settings.staging,
            )
            stack.callback(self.provider.close)
            tokens, self.token_file = self._tokens(settings, stack)
            self.server = ProviderServer(self.provider, tokens, sock=sock, tls=tls)
            stack.callback(self.server.close)
            self._ending = stack.pop_all()
        if tls is None and not host.startswith(_LOOPBACK):
            log.warning(
                "what clients send to %s is not encrypted; use --tls-cert and --tls-key, or a "
                "network that is trusted",
                self.address,
            )

    def _tokens(
        self, settings: ServeSettings, stack: contextlib.ExitStack
    ) -> tuple[Mapping[str, tuple[str, Rights]], Path | None]:
        """All tokens, and the file of the one with every right."""
        tokens = load_rights(settings.rights) if settings.rights is not None else {}
        path = settings.token_file
        if path is None and tokens:
            return tokens, None
        if path is None and settings.place == "memory:":
            folder = tempfile.mkdtemp(prefix="sapwood-store-")
            path = Path(folder) / _TOKEN_FILE
            stack.callback(os.rmdir, folder)
            stack.callback(path.unlink, missing_ok=True)
        elif path is None:
            path = Path(settings.place) / _TOKEN_FILE
        token, _ = read_or_make_token(path)
        return {**tokens, key_of(token): (token, owner_rights())}, path

    def close(self) -> None:
        """End every session, then close the provider. Calling it again does nothing."""
        self._ending.close()

    def __enter__(self) -> Self:
        """It is closed at the end of the block."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close it."""
        self.close()


def parse_size(text: str) -> int:
    """Bytes, of a text such as ``4GB``; kB, MB, GB and TB are powers of 1000, KiB of 1024.

    Raises:
        ConfigError: it is none.
    """
    found = _SIZE.fullmatch(text.strip())
    if found is None:
        raise ConfigError(f"{text!r} is no size; expected bytes, or such as 4GB or 512MiB")
    power = " kmgt".index(found[2].lower() or " ")
    return int(float(found[1]) * (1024 if found[3] else 1000) ** power)


def parse_members(text: str) -> tuple[Member, ...]:
    """Members, of a text such as ``p0=host:7070,p1=host2:7070``.

    Raises:
        ConfigError: it is not such a text, or two have one name.
    """
    found = []
    for one in text.split(","):
        name, equals, address = one.strip().partition("=")
        if not equals:
            raise ConfigError(f"{one!r} is no member; expected p0=host:port,p1=host2:port")
        split_address(address)
        found.append(Member(_checked_name(name), address))
    if len({one.name for one in found}) != len(found):
        raise ConfigError(f"{text!r} names a member twice")
    return tuple(found)


def _check(settings: ServeSettings) -> None:
    _checked_name(settings.name)
    host, _, port = settings.listen.rpartition(":")
    if not host or not port.isdecimal() or int(port) >= 2**16:
        raise ConfigError(f"--listen is {settings.listen!r}, expected host:port")
    if host.strip("[]") in _EVERYWHERE and settings.advertise is None:
        raise ConfigError(
            f"--listen {settings.listen} is every interface; say with --advertise host:port how "
            "others reach it"
        )
    if (settings.tls_cert is None) != (settings.tls_key is None):
        raise ConfigError("--tls-cert and --tls-key go together")
    if settings.placement not in ("content", "model"):
        raise ConfigError(f"--placement is {settings.placement!r}, expected content or model")
    if settings.replicas < 1:
        raise ConfigError(f"--replicas is {settings.replicas}, expected 1 or more")
    if settings.memory is not None and settings.place != "memory:":
        raise ConfigError(f"--memory goes with the place memory:, not with {settings.place}")


def _checked_name(name: str) -> str:
    try:
        return check_version(name)
    except ValueError:
        raise ConfigError(
            f"{name!r} is no name of a provider; expected one such as p0, of letters, digits and "
            "'._+=-'"
        ) from None


def _reachable(advertise: str | None, host: str, port: int) -> str:
    if advertise is not None:
        split_address(advertise)
        return advertise
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _members(settings: ServeSettings, address: str) -> Members | None:
    if settings.members is None:
        if settings.replicas > 1:
            raise ConfigError(f"--replicas {settings.replicas} takes as many --members")
        if settings.placement != "content":
            raise ConfigError(f"--placement {settings.placement} goes with --members")
        return None
    members = parse_members(settings.members)
    mine = {one.name: one.address for one in members}.get(settings.name)
    if mine is None:
        raise ConfigError(f"--members does not name this provider, {settings.name}; see --name")
    if mine != address:
        raise ConfigError(
            f"--members has {settings.name} at {mine}, but it is at {address}; see --listen and "
            "--advertise"
        )
    if settings.replicas > len(members):
        raise ConfigError(
            f"--replicas is {settings.replicas}, but there are {len(members)} members"
        )
    return Members(
        epoch=1, members=members, replicas=settings.replicas, placement=settings.placement
    )


def _raise_limits() -> None:
    """Each large object in memory, and each client, takes a descriptor."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
