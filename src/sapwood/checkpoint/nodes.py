"""Which ranks share a node, and where the nodes' engines can be reached by each other.

Ranks of one host share a node, unless ``SAPWOOD_NODE`` gives them other names.
"""

from __future__ import annotations

import os
import platform
import random
import secrets
import socket
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace

from sapwood.errors import ConfigError
from sapwood.runtime.group import Group
from sapwood.runtime.host import HOST, own_host
from sapwood.tiers.make import peer_folder
from sapwood.tiers.spec import NodeMap, TierSpec

__all__ = ["HOST", "NODE", "find_nodes", "find_peers"]

NODE = "SAPWOOD_NODE"
# Below the ports Linux gives to outgoing connections, and beside those a launcher may choose.
_PORTS = range(10240, 20000)
_TRIES = 50
_DICE = random.SystemRandom()  # the training's own random numbers are not ours to draw


def find_nodes(group: Group) -> NodeMap:
    """Ask all ranks for their node."""
    mine = os.environ.get(NODE) or platform.node() or "node"
    return NodeMap(node=mine, rank_nodes=tuple(group.gather_text("node", mine)))


def find_peers(group: Group, nodes: NodeMap, specs: Sequence[TierSpec]) -> NodeMap:
    """The same nodes with an address for each, if a tier needs other nodes.

    Addresses are agreed on before the engines listen there, so that an engine that is started again
    is where the others look for it.
    """
    if peer_folder(specs, nodes) is None:
        return nodes
    token = group.share_text("peer token", secrets.token_hex(16))
    mine = _free_address() if group.rank == nodes.ranks[0] else ""
    texts = group.gather_text("engine address", mine)
    addresses = {node: texts[nodes.rank_nodes.index(node)] for node in nodes.nodes}
    return replace(nodes, addresses=addresses, token=token)


def _free_address() -> str:
    host = own_host()
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for port in _DICE.sample(_PORTS, _TRIES):
        with closing(socket.socket(family)) as trial:
            try:
                trial.bind((host, port))
            except OSError:
                continue
            return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    raise ConfigError(f"no port of {host} is free; set {HOST} to an address of this machine")
