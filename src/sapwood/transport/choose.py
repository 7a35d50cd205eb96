"""Which transport a transfer uses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import torch

from sapwood.errors import ConfigError
from sapwood.runtime.stores import Store
from sapwood.transport.base import Ends, Link
from sapwood.transport.device import StagedLink, one_gpu_each

__all__ = ["KINDS", "Kind", "open_link", "resolve"]

Kind = Literal["auto", "gloo", "memory", "mpi", "mooncake", "nccl"]
KINDS: tuple[Kind, ...] = ("auto", "gloo", "memory", "mpi", "mooncake", "nccl")


def resolve(kind: str, machines: Sequence[str], devices: Sequence[str] = ()) -> str:
    """What ``kind`` means between these processes.

    For "auto": NCCL where each has a GPU to itself, memory on one machine, else gloo.

    Args:
        kind: One of ``KINDS``.
        machines: The machine of each process.
        devices: Where its tensors are ("cpu", "cuda:1", ...); none: all in CPU memory.
    """
    if kind not in KINDS:
        raise ConfigError(f"transport={kind!r}, but it is one of {', '.join(KINDS)}")
    if kind != "auto":
        return kind
    if _has_nccl() and one_gpu_each(machines, devices):
        return "nccl"
    return "memory" if len(set(machines)) == 1 else "gloo"


def open_link(kind: str, store: Store, ends: Ends, *, devices: Sequence[str] = ()) -> Link:
    """Open a link of this kind; all processes of a transfer name the same.

    Args:
        kind: One of ``KINDS``.
        store: Known to all processes; the link's keys have a prefix of their own.
        ends: Who meets.
        devices: As in ``resolve``; tensors a transport cannot reach go through CPU memory.

    Raises:
        TransportError: Not all came in time.
        ConfigError: There is no such transport, or it does not work here; what to do.
    """
    chosen = resolve(kind, ends.machines or ends.hosts, devices)
    link = _opener(chosen)(store, ends)
    direct = chosen == "nccl" or all(torch.device(one).type == "cpu" for one in devices)
    return link if direct else StagedLink(link)


def _has_nccl() -> bool:
    return torch.cuda.is_available() and torch.distributed.is_nccl_available()


def _opener(name: str) -> Callable[[Store, Ends], Link]:
    """Imported when chosen: most need something that is not always there."""
    if name == "gloo":
        from sapwood.transport.gloo import open_gloo

        return open_gloo
    if name == "memory":
        from sapwood.transport.memory import open_memory

        return open_memory
    if name == "mpi":
        from sapwood.transport.mpi import open_mpi

        return open_mpi
    if name == "mooncake":
        from sapwood.transport.mooncake import open_mooncake

        return open_mooncake
    from sapwood.transport.nccl import open_nccl

    return open_nccl
