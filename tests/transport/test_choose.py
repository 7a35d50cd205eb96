from __future__ import annotations

from contextlib import closing

import pytest

from sapwood.errors import ConfigError
from sapwood.runtime.stores import HashStore
from sapwood.transport import choose
from sapwood.transport.base import Ends
from sapwood.transport.choose import open_link, resolve
from sapwood.transport.device import StagedLink, one_gpu_each
from sapwood.transport.memory import open_memory


def ends(*hosts: str) -> Ends:
    return Ends(me=0, donors=1, hosts=hosts, timeout=0.2)


def test_auto_is_memory_on_one_machine_and_gloo_between_two() -> None:
    assert resolve("auto", ["a", "a"]) == "memory"
    assert resolve("auto", ["a", "b"]) == "gloo"
    assert resolve("mpi", ["a", "a"]) == "mpi"


def test_auto_is_nccl_where_there_is_nccl_and_each_has_a_gpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpus = ["cuda:0", "cuda:1"]
    assert resolve("auto", ["a", "b"], gpus) == "gloo"
    monkeypatch.setattr(choose, "_has_nccl", lambda: True)
    assert resolve("auto", ["a", "b"], gpus) == "nccl"
    assert resolve("auto", ["a", "b"], ["cuda:0", "cpu"]) == "gloo"
    assert resolve("gloo", ["a", "b"], gpus) == "gloo"


def test_an_unknown_kind_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"carrier.*gloo, memory, mpi, mooncake"):
        open_link("carrier", HashStore(), ends("a", "a"))


def test_memory_between_two_machines_is_refused() -> None:
    with pytest.raises(ConfigError, match="a, b"):
        open_memory(HashStore(), ends("a", "b"))


def test_tensors_elsewhere_go_through_cpu_memory() -> None:
    for device, staged in (("xpu:0", True), ("cpu", False)):
        with closing(open_link("memory", HashStore(), alone(), devices=[device])) as link:
            assert isinstance(link, StagedLink) == staged


def alone() -> Ends:
    return Ends(me=0, donors=1, hosts=("a",), timeout=5.0)


@pytest.mark.parametrize(
    ("hosts", "devices", "expected"),
    [
        ("aa", ("cpu", "cpu"), False),
        ("aa", ("cuda:0", "cuda:1"), True),
        ("ab", ("cuda:0", "cuda:0"), True),
        ("aa", ("cuda:0", "cuda:0"), False),
        ("aa", ("cuda:0", "cpu"), False),
        ("aa", ("xpu:0", "xpu:1"), False),
        ("aa", (), False),
    ],
)
def test_nccl_needs_a_gpu_for_each(hosts: str, devices: tuple[str, ...], expected: bool) -> None:
    assert one_gpu_each(hosts, devices) == expected
