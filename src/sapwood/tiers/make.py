"""Tiers from their settings."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from sapwood.errors import ConfigError
from sapwood.tiers.base import Tier
from sapwood.tiers.external import ExternalTier
from sapwood.tiers.local import LocalTier
from sapwood.tiers.memory import MemoryTier
from sapwood.tiers.packed import PackedTier
from sapwood.tiers.parity import ParityTier
from sapwood.tiers.partner import PartnerTier
from sapwood.tiers.peers import PeerServer
from sapwood.tiers.spec import NodeMap, TierSpec
from sapwood.tiers.versions import VersionTier
from sapwood.tiers.versions.facts import Origin

__all__ = ["make_tiers", "peer_folder", "serve_peers"]

_ON_PEERS = ("partner", "parity")


def make_tiers(specs: Sequence[TierSpec], nodes: NodeMap) -> list[Tier]:
    """The tiers of one node, in the order given, which goes from cheap to expensive."""
    keep = peer_folder(specs, nodes)
    return [_make(spec, nodes, keep) for spec in specs]


def peer_folder(specs: Sequence[TierSpec], nodes: NodeMap) -> Path | None:
    """What this node's ``PeerServer`` must serve; None if no tier rests on other nodes.

    Raises:
        ConfigError: no folder was given for it, or two.
    """
    wanting = [spec for spec in specs if spec.kind in _ON_PEERS]
    if not wanting:
        return None
    given = {spec.folder for spec in wanting if spec.folder}
    if len(given) > 1:
        raise ConfigError(f"tiers partner and parity share one folder, but {sorted(given)} are set")
    if given:
        return Path(given.pop()) / nodes.node / "kept"
    for spec in specs:
        if spec.kind == "local" and spec.place:
            return Path(spec.place) / nodes.node / "kept"
    kind = wanting[0].kind
    example = "partner:/scratch/kept" if kind == "partner" else "parity:4+2:/scratch/kept"
    raise ConfigError(
        f"tier {kind}: no folder is set for what this node keeps for others; write it as "
        f"{example}, or add a local tier"
    )


def serve_peers(specs: Sequence[TierSpec], nodes: NodeMap) -> ExitStack:
    """Keep for other nodes what they send, at the address agreed on; closing the result ends it.

    Does nothing if no tier rests on other nodes.

    Raises:
        ConfigError: the address is taken, or no folder is set.
    """
    stack = ExitStack()
    folder = peer_folder(specs, nodes)
    if folder is not None and nodes.node in nodes.addresses:
        host, _, port = nodes.addresses[nodes.node].rpartition(":")
        listen = nodes.bind or host.strip("[]")
        server = PeerServer(folder, nodes.token, host=listen, port=int(port))
        stack.enter_context(server)
    return stack


def _make(spec: TierSpec, nodes: NodeMap, keep: Path | None) -> Tier:
    if spec.kind == "memory":
        return MemoryTier()
    if spec.kind == "local":
        folder = Path(spec.place) / nodes.node
        if spec.incremental or spec.compress:
            return PackedTier(folder, incremental=spec.incremental, compress=spec.compress)
        return LocalTier(folder)
    if spec.kind == "external":
        return ExternalTier(Path(spec.place))
    if spec.kind == "partner" and keep is not None:
        return PartnerTier(nodes, keep, timeout=spec.timeout)
    if spec.kind == "parity" and keep is not None:
        scheme = spec.place.partition(":")[0]
        return ParityTier(scheme, nodes, keep, timeout=spec.timeout)
    if spec.kind == "store":
        origin = Origin(series=spec.series, name=spec.name, forked=spec.forked)
        return VersionTier(spec.place, origin)
    if spec.kind == "s3":
        from sapwood.tiers.s3 import S3Tier  # it imports obstore, which is an extra

        return S3Tier(spec.place)
    raise ConfigError(f"tier {spec.kind!r} is not known")
