from __future__ import annotations

import pytest

from sapwood.errors import ConfigError
from sapwood.runtime.stores import HashStore
from sapwood.transport.base import Ends
from sapwood.transport.choose import open_link, resolve
from sapwood.transport.device import way
from sapwood.transport.memory import open_memory


def ends(*hosts: str) -> Ends:
    return Ends(me=0, donors=1, hosts=hosts, timeout=0.2)


def test_auto_is_memory_on_one_machine_and_gloo_between_two() -> None:
    assert resolve("auto", ends("a", "a")) == "memory"
    assert resolve("auto", ends("a", "b")) == "gloo"
    assert resolve("mpi", ends("a", "a")) == "mpi"


def test_an_unknown_kind_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"carrier.*gloo, memory, mpi, mooncake"):
        open_link("carrier", HashStore(), ends("a", "a"))


def test_memory_between_two_machines_is_refused() -> None:
    with pytest.raises(ConfigError, match="a, b"):
        open_memory(HashStore(), ends("a", "b"))


@pytest.mark.parametrize(
    ("devices", "nccl", "expected"),
    [
        (("cpu", "cpu"), True, "direct"),
        (("cuda:0", "cuda:1"), True, "nccl"),
        (("cuda:0", "cuda:1"), False, "staged"),
        (("cuda:0", "cpu"), True, "staged"),
        (("xpu:0", "xpu:1"), True, "staged"),
    ],
)
def test_the_way_follows_the_devices(devices: tuple[str, ...], nccl: bool, expected: str) -> None:
    assert way(devices, nccl=nccl) == expected
