"""Mooncake Store over TCP: a master and the memory of this process, one key for each tensor."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from .store_ways import Way, bytes_view

__all__ = ["Mooncake"]

MIB = 2**20
Buffers = list[tuple[int, int]]


class Mooncake(Way):
    def __init__(
        self, folder: Path, durability: str, server: Mapping[str, str], nbytes: int
    ) -> None:
        """``server``: addresses of the master and of its metadata."""
        from mooncake.store import MooncakeDistributedStore

        super().__init__(folder, durability)
        self.store = MooncakeDistributedStore()
        self.registered: set[int] = set()
        code = self.store.setup(
            "127.0.0.1",
            server["metadata"],
            nbytes + 512 * MIB,
            512 * MIB,
            "tcp",
            "",
            server["master"],
        )
        if code:
            raise RuntimeError(f"Mooncake's client did not start: code {code}")

    def buffers(self, tensors: Mapping[str, Tensor]) -> Buffers:
        """Addresses and sizes; each is made known to Mooncake once."""
        found = []
        for tensor in tensors.values():
            address = bytes_view(tensor).ctypes.data
            if address not in self.registered:
                if self.store.register_buffer(address, tensor.nbytes):
                    raise RuntimeError("Mooncake does not take the memory")
                self.registered.add(address)
            found.append((address, tensor.nbytes))
        return found

    def save(self, name: str, tensors: Mapping[str, Tensor]) -> None:
        self.move(self.store.batch_put_from, name, tensors)

    def load(self, name: str, out: Mapping[str, Tensor]) -> None:
        self.move(self.store.batch_get_into, name, out)

    def move(self, call: object, name: str, tensors: Mapping[str, Tensor]) -> None:
        pairs = self.buffers(tensors)
        keys = [f"{name}/{key}" for key in tensors]
        assert callable(call)
        codes = call(keys, [address for address, _ in pairs], [size for _, size in pairs])
        if min(codes) < 0:
            raise RuntimeError(f"Mooncake failed with code {min(codes)}")
        self.names = keys

    def remove(self, name: str) -> None:
        self.store.remove_all()

    def stored(self) -> int:
        return sum(max(self.store.get_size(key), 0) for key in self.names)

    def close(self) -> None:
        self.store.close()
