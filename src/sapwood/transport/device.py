"""Tensors that are not in CPU memory: how they go, and going by way of CPU memory."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch
from torch import Tensor

from sapwood.transport.base import Link, Transfer

__all__ = ["StagedLink", "one_gpu_each"]


def one_gpu_each(hosts: Sequence[str], devices: Sequence[str]) -> bool:
    """Whether every process has a GPU that no other one has: only those can NCCL connect."""
    places = set(zip(hosts, devices, strict=False))
    cuda = all(torch.device(one).type == "cuda" for one in devices)
    return cuda and len(places) == len(devices) == len(hosts)


class StagedLink:
    """A link whose tensors go through CPU memory, pinned where there is a GPU."""

    gathers = False

    def __init__(self, link: Link) -> None:
        """``link`` carries CPU memory; it is closed with this one."""
        self._link = link

    @property
    def name(self) -> str:
        """That of the link beneath."""
        return self._link.name

    def send(self, peer: int, tag: int, data: Tensor) -> Transfer:
        """Copy to CPU memory and begin to send."""
        staging = _staging(data)
        staging.copy_(data)  # waits for the device, as a copy to CPU memory does by default
        return self._link.send(peer, tag, staging)

    def recv(self, peer: int, tag: int, data: Tensor) -> Transfer:
        """Begin to receive into CPU memory; ``wait`` copies from there."""
        staging = _staging(data)
        return _Unstaging(self._link.recv(peer, tag, staging), staging, data)

    def close(self) -> None:
        """Close the link beneath."""
        self._link.close()


class _Unstaging:
    """A message that arrives in CPU memory and belongs elsewhere."""

    def __init__(self, under_way: Transfer, staging: Tensor, data: Tensor) -> None:
        self._under_way = under_way
        self._staging: Tensor | None = staging
        self._data = data
        self._lock = threading.Lock()

    def wait(self, timeout: float) -> None:
        """Wait for the message, and copy it where it belongs, once."""
        self._under_way.wait(timeout)
        with self._lock:
            if self._staging is not None:
                self._data.copy_(self._staging)
                self._staging = None


def _staging(data: Tensor) -> Tensor:
    pinned = data.device.type == "cuda"
    return torch.empty(data.shape, dtype=data.dtype, device="cpu", pin_memory=pinned)
