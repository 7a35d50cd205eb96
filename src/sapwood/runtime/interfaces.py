"""The IP addresses of this machine, and which of them talks to a given host."""

from __future__ import annotations

import fcntl
import ipaddress
import socket
import struct
from contextlib import closing, suppress
from pathlib import Path

__all__ = ["is_loopback", "is_own", "own_addresses", "resolved", "route_to"]

_SIOCGIFADDR = 0x8915
_DISCARD = 9
"""A port for sockets that only look up a route: connecting a UDP socket sends nothing."""


def is_loopback(address: str) -> bool:
    """Whether only this machine reaches it; also "localhost"."""
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return address == "localhost"


def resolved(host: str) -> list[str]:
    """The addresses of a name or address as this machine sees them, in the resolver's order."""
    try:
        found = socket.getaddrinfo(host, _DISCARD, type=socket.SOCK_DGRAM)
    except (OSError, UnicodeError):
        return []
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


def route_to(host: str) -> str:
    """The local address from which this machine talks to ``host``; "" without a route.

    A name with several addresses gives the first route that leaves loopback, if any does.
    """
    found = [_local_end(address) for address in resolved(host)]
    usable = [address for address in found if address]
    return next((one for one in usable if not is_loopback(one)), usable[0] if usable else "")


def is_own(address: str) -> bool:
    """Whether this machine can listen on an address."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with suppress(OSError), closing(socket.socket(family)) as trial:
        trial.bind((address, 0))
        return True
    return False


def own_addresses() -> dict[str, str]:
    """Address to interface: IPv4 first, without loopback and link-local addresses."""
    found = {}
    with closing(socket.socket(socket.AF_INET, socket.SOCK_DGRAM)) as probe:
        for _, name in socket.if_nameindex():
            with suppress(OSError):
                asked = struct.pack("256s", name.encode()[:15])
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, asked)
                found[socket.inet_ntoa(answer[20:24])] = name
    with suppress(OSError):
        for line in Path("/proc/net/if_inet6").read_text().splitlines():
            raw, *_, name = line.split()
            found[str(ipaddress.IPv6Address(bytes.fromhex(raw)))] = name
    return {one: name for one, name in found.items() if _reachable(one)}


def _reachable(address: str) -> bool:
    parsed = ipaddress.ip_address(address)
    return not (parsed.is_loopback or parsed.is_link_local or parsed.is_unspecified)


def _local_end(address: str) -> str:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with suppress(OSError), closing(socket.socket(family, socket.SOCK_DGRAM)) as probe:
        probe.connect((address, _DISCARD))
        local = str(probe.getsockname()[0]).partition("%")[0]
        # A link-local address means nothing without the name of an interface of the other side.
        return "" if ipaddress.ip_address(local).is_link_local else local
    return ""
