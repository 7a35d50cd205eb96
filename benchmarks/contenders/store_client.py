"""A client of providers, told what to do by lines of JSON; it answers each with one.

python store_client.py URL MB TENSORS SEED
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import torch

from sapwood.store import open as open_repository

MB = 10**6


class Client:
    """Saves other bytes each time, and loads into tensors that are there."""

    def __init__(self, url: str, mb: int, tensors: int, seed: int) -> None:
        made = torch.Generator().manual_seed(seed)
        elements = mb * MB // tensors // 4
        self.value = {f"layer{n}": torch.randn(elements, generator=made) for n in range(tensors)}
        self.out = {name: torch.zeros_like(tensor) for name, tensor in self.value.items()}
        self.repo = open_repository(url, durability="memory", local=False)
        self.name = f"client{seed}"

    def change(self, _: dict[str, Any]) -> None:
        for tensor in self.value.values():
            tensor.view(torch.int32).add_(0x01000193)

    def save(self, told: dict[str, Any]) -> None:
        self.repo.save(self.value, f"{self.name}@{told['version']}")

    def load(self, told: dict[str, Any]) -> None:
        self.repo.load(f"{self.name}@{told['version']}", into=self.out)

    def check(self, _: dict[str, Any]) -> None:
        if not all(torch.equal(self.out[name], tensor) for name, tensor in self.value.items()):
            raise ValueError("what was loaded is not what was saved")

    def remove(self, told: dict[str, Any]) -> None:
        self.repo.remove(f"{self.name}@{told['version']}")

    def tidy(self, _: dict[str, Any]) -> None:
        self.repo.gc(quiet=0)


def main() -> None:
    url, *numbers = sys.argv[1:]
    torch.set_num_threads(1)
    client = Client(url, *map(int, numbers))
    print(json.dumps({"pid": os.getpid()}), flush=True)
    for line in sys.stdin:
        told = json.loads(line)
        try:
            getattr(client, told["do"])(told)
            answer = {}
        except Exception as error:  # the benchmark says what went wrong
            answer = {"error": repr(error)}
        print(json.dumps(answer), flush=True)
    client.repo.close()


if __name__ == "__main__":
    main()
