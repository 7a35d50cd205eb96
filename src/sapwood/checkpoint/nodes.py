"""Which ranks share a node, and where the nodes' engines can be reached by each other.

Ranks of one host share a node, unless ``SAPWOOD_NODE`` gives them other names. A node is never
larger than a machine: its ranks and its engine meet on an abstract socket.
"""

from __future__ import annotations

import json
import os
import platform
import random
import socket
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace

from sapwood.errors import ConfigError
from sapwood.runtime.group import Group
from sapwood.runtime.host import HOST, bind_for, find_hosts, machine_key
from sapwood.tiers.make import peer_folder
from sapwood.tiers.spec import NodeMap, TierSpec

__all__ = ["HOST", "NODE", "find_nodes", "find_peers"]

NODE = "SAPWOOD_NODE"
# Below the ports Linux gives to outgoing connections, and beside those a launcher may choose.
_PORTS = range(10240, 20000)
_TRIES = 50
_DICE = random.SystemRandom()  # the training's own random numbers are not ours to draw


def find_nodes(group: Group) -> NodeMap:
    """Ask all ranks for their node.

    Raises:
        ConfigError: ranks on different machines have the same node.
    """
    mine = os.environ.get(NODE) or platform.node() or "node"
    said = group.gather_text("node", json.dumps([mine, machine_key()]))
    first: dict[str, tuple[int, str]] = {}
    names = []
    for rank, (name, machine) in enumerate(map(json.loads, said)):
        names.append(name)
        other, known = first.setdefault(name, (rank, machine))
        if known != machine:
            raise ConfigError(
                f"ranks {other} and {rank} are on different machines, or in containers with "
                f"networks of their own, that are both called {name}; set {NODE} to another name "
                "on each, the same at every start"
            )
    return NodeMap(node=mine, rank_nodes=tuple(names))


def find_peers(group: Group, nodes: NodeMap, specs: Sequence[TierSpec]) -> NodeMap:
    """The same nodes with an address for each, if a tier needs other nodes.

    Addresses are agreed on before the engines listen there, so that an engine that is started again
    is where the others look for it.
    """
    if peer_folder(specs, nodes) is None:
        return nodes
    token = group.secret("peers")
    host = find_hosts(group).addresses[group.rank]
    bind = bind_for(host)
    mine = _free_address(host, bind) if group.rank == nodes.ranks[0] else ""
    texts = group.gather_text("engine address", mine)
    addresses = {node: texts[nodes.rank_nodes.index(node)] for node in nodes.nodes}
    return replace(nodes, addresses=addresses, bind=bind, token=token)


def _free_address(host: str, bind: str) -> str:
    family = socket.AF_INET6 if ":" in bind else socket.AF_INET
    for port in _DICE.sample(_PORTS, _TRIES):
        with closing(socket.socket(family)) as trial:
            try:
                trial.bind((bind, port))
            except OSError:
                continue
            return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    raise ConfigError(f"no port of {bind} is free; set {HOST} to an address of this machine")
