"""The address under which other machines reach this one: what a rank advertises and listens on.

The contract of ``find_hosts``, which every listener and every transport of a rank goes by:

- All ranks on one machine, no ``SAPWOOD_HOST``: 127.0.0.1.
- Several machines: the local address of the route to where the ranks met. A rank that meets over
  loopback, because it is on the machine of the meeting place, whose name may be 127.0.1.1 there,
  takes the route to a rank of another machine. Loopback is never advertised.
- ``SAPWOOD_HOST`` decides where it is set: an address, a name or an interface of this machine.
- A rank listens on what it advertises and nowhere else. ``SAPWOOD_BIND`` is for an advertised
  address that the machine does not have, because something forwards it (NAT): then it says where
  to listen, and 0.0.0.0 is every interface.
"""

from __future__ import annotations

import json
import os
import socket
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from sapwood.errors import ConfigError
from sapwood.runtime.interfaces import is_loopback, is_own, own_addresses, resolved, route_to

__all__ = [
    "BIND",
    "HOST",
    "LOOPBACK",
    "Hosts",
    "bind_for",
    "find_hosts",
    "given_host",
    "host_toward",
    "machine_key",
    "own_address",
]

HOST = "SAPWOOD_HOST"
"""Overrides the advertised address."""
BIND = "SAPWOOD_BIND"
"""Where to listen if that is not the advertised address."""
LOOPBACK = "127.0.0.1"
# Of a network for documentation: only a default route leads there.
_ANYWHERE = "203.0.113.1"
# Where the kernel does not tell, a process shares its machine with nobody.
_ALONE = uuid.uuid4().hex


@dataclass(frozen=True, slots=True, kw_only=True)
class Hosts:
    """Where each rank of a group is, by rank."""

    addresses: tuple[str, ...]
    """Under which the other ranks reach it."""
    machines: tuple[str, ...]
    """Its ``machine_key``."""

    @property
    def one_machine(self) -> bool:
        """Whether all ranks share a machine."""
        return len(set(self.machines)) == 1


class Gathers(Protocol):
    """What ``find_hosts`` needs of a group of ranks."""

    rank: int
    meeting: str
    """The host where the ranks met; empty if they met without a network."""
    hosts: Hosts | None
    """What was found before."""

    def gather_text(self, key: str, text: str) -> list[str]:
        """Every rank's text."""
        ...


def find_hosts(group: Gathers) -> Hosts:
    """Ask all ranks where they are; all of them must call it, and the first call's answer stays.

    Raises:
        ConfigError: on every rank, if one has no address that the others could reach.
    """
    if group.hosts is None:
        group.hosts = _find(group)
    return group.hosts


def machine_key() -> str:
    """What processes of one machine have in common: a kernel that runs, and a network namespace.

    Containers with a network of their own are machines of their own, whatever their host's name.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace = Path("/proc/self/ns/net").stat().st_ino
    except OSError:
        return _ALONE
    return f"{boot}:{namespace}"


def given_host(env: Mapping[str, str] | None = None) -> str:
    """The address that ``SAPWOOD_HOST`` names; empty if it is not set.

    Raises:
        ConfigError: this machine does not have it.
    """
    text = (os.environ if env is None else env).get(HOST, "").strip()
    return own_address(text, HOST) if text else ""


def own_address(text: str, setting: str) -> str:
    """The address of this machine that a user means by an address, a name or an interface.

    With ``SAPWOOD_BIND`` it may be one that is only forwarded to this machine.

    Raises:
        ConfigError: this machine does not have it; the message names ``setting``.
    """
    text = text.strip("[]")
    have = own_addresses()
    by_interface = next((one for one, name in have.items() if name == text), "")
    if by_interface:
        return by_interface
    found = resolved(text)
    if not found:
        raise ConfigError(
            f"{setting}={text!r} is neither an address, nor an interface of this machine, nor a "
            f"name that it can resolve; {_remedy(have)}"
        )
    if os.environ.get(BIND):
        found.sort(key=is_loopback)
        if is_loopback(found[0]) and not _says_loopback(text):
            raise ConfigError(
                f"{setting}={text!r} is {found[0]} on this machine ({_here()}), which no other "
                f"machine can reach; set {setting} to the address that is forwarded to this machine"
            )
        return found[0]
    # Debian gives a machine's own name the address 127.0.1.1, beside which DNS may know another.
    own = sorted(filter(is_own, found), key=is_loopback)
    if not own:
        raise ConfigError(
            f"{setting}={text!r} is no address of this machine ({_here()}); {_remedy(have)}. If it "
            f"is forwarded to this machine, set {BIND} to the address to listen on, 0.0.0.0 for all"
        )
    if is_loopback(own[0]) and not _says_loopback(text):
        raise ConfigError(
            f"{setting}={text!r} is {own[0]} on this machine ({_here()}), which no other machine "
            f"can reach; {_remedy(have)}"
        )
    return own[0]


def bind_for(host: str) -> str:
    """Where to listen when ``host`` is advertised."""
    return host if is_loopback(host) else os.environ.get(BIND) or host


def host_toward(target: str) -> str:
    """What a process that joins from elsewhere advertises to whoever is at ``target``.

    Raises:
        ConfigError: ``SAPWOOD_HOST`` is no address of this machine.
    """
    return given_host() or route_to(target) or LOOPBACK


# -- all ranks together ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Said:
    machine: str
    given: str
    """By the user."""
    routed: str
    """By the route to the meeting place; empty if that is on this machine's loopback."""
    problem: str

    @property
    def address(self) -> str:
        return self.given or self.routed


def _find(group: Gathers) -> Hosts:
    said = [_Said(*json.loads(text)) for text in group.gather_text("address", _say(group))]
    _refuse([one.problem for one in said])
    machines = tuple(one.machine for one in said)
    if len(set(machines)) == 1:
        # A rank whose environment lacks the variable is as well reached by its neighbour's address.
        given = next((one.given for one in said if one.given), LOOPBACK)
        return Hosts(addresses=tuple(one.given or given for one in said), machines=machines)
    mine = _among_machines(said, group.rank)
    texts = [json.loads(text) for text in group.gather_text("address to all", json.dumps(mine))]
    _refuse([problem for _, problem in texts])
    hosts = Hosts(addresses=tuple(address for address, _ in texts), machines=machines)
    if not any(one.given for one in said):
        _check_distinct(hosts)
    return hosts


def _say(group: Gathers) -> str:
    given = problem = ""
    try:
        given = given_host()
    except ConfigError as error:
        problem = f"rank {group.rank}: {error}"
    routed = route_to(group.meeting) if group.meeting else ""
    return json.dumps([machine_key(), given, "" if is_loopback(routed) else routed, problem])


def _among_machines(said: Sequence[_Said], rank: int) -> tuple[str, str]:
    """This rank's address towards other machines, or why there is none."""
    mine = said[rank]
    if is_loopback(mine.given):
        return "", (
            f"rank {rank}: {HOST} is {mine.given}, but there are ranks on other machines; set it "
            "to an address that they can reach, or leave it empty"
        )
    neighbours = [one for one in said if one.machine == mine.machine]
    given = next((one.given for one in neighbours if one.given), "")
    others = [one.address for one in said if one.machine != mine.machine and one.address]
    tried = (given, mine.routed, *map(route_to, others), route_to(socket.gethostname()))
    found = next((one for one in (*tried, route_to(_ANYWHERE)) if one and not is_loopback(one)), "")
    if found:
        return found, ""
    return "", (
        f"rank {rank} on {_here()} has no address for the ranks on other machines; "
        f"{_remedy(own_addresses())}"
    )


def _check_distinct(hosts: Hosts) -> None:
    """Containers on different hosts often have the same private address."""
    first: dict[str, int] = {}
    for rank, address in enumerate(hosts.addresses):
        other = first.setdefault(address, rank)
        if hosts.machines[other] != hosts.machines[rank]:
            raise ConfigError(
                f"ranks {other} and {rank} are on different machines and both have the address "
                f"{address}; set {HOST} on each to an address that the others can reach"
            )


def _refuse(problems: Sequence[str]) -> None:
    found = next((problem for problem in problems if problem), "")
    if found:
        raise ConfigError(found)


def _says_loopback(text: str) -> bool:
    return is_loopback(text) or text.endswith(".localhost")


def _here() -> str:
    return socket.gethostname()


def _remedy(have: Mapping[str, str]) -> str:
    shown = ", ".join(f"{address} ({name})" for address, name in have.items())
    return f"set {HOST} to one of its addresses: {shown or 'it has none but loopback'}"
