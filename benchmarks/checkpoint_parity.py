"""How fast are the parity fragments of a checkpoint made, and lost ones rebuilt?

python benchmarks/checkpoint_parity.py --quick
python benchmarks/checkpoint_parity.py --full --case block=4
"""

from __future__ import annotations

import importlib.util
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from core import Benchmark, Case, Contender, Extra, Metric, NotRun, Plan, Target, main

DATA, PARITY = 4, 2
LOST = (0, 1)
"""Two fragments of data: the most that can be lost, and the most work to rebuild."""
MIB = 2**20
Block = Any


class Sapwood:
    """The codec of the parity tier."""

    def __init__(self, block: int) -> None:
        from sapwood.tiers.codec import Codec, Scheme

        self.codec = Codec(Scheme(DATA, PARITY), block=block)
        size = self.codec.fragment_bytes(block)
        self.fragments = [np.ones(size, np.uint8) for _ in range(DATA + PARITY)]
        self.out = np.ones(block, np.uint8)

    def encode(self, block: Block) -> None:
        self.codec.encode(block, self.fragments)

    def decode(self) -> Block:
        left = {n: piece for n, piece in enumerate(self.fragments) if n not in LOST}
        self.codec.decode(left, self.out)
        return self.out


class Pyeclib:
    """The library alone, a call per block."""

    def __init__(self, block: int) -> None:
        from pyeclib.ec_iface import ECDriver

        self.driver = ECDriver(k=DATA, m=PARITY, ec_type="isa_l_rs_cauchy")
        self.fragments: list[bytes] = []

    def encode(self, block: Block) -> None:
        self.fragments = self.driver.encode(block.tobytes())

    def decode(self) -> Block:
        left = [piece for n, piece in enumerate(self.fragments) if n not in LOST]
        return np.frombuffer(self.driver.decode(left), np.uint8)


class Memcpy:
    """Copying a block: what moving its bytes once costs at least."""

    def __init__(self, block: int) -> None:
        self.buffer, self.out = np.ones(block, np.uint8), np.ones(block, np.uint8)

    def encode(self, block: Block) -> None:
        np.copyto(self.buffer, block)

    def decode(self) -> Block:
        np.copyto(self.out, self.buffer)
        return self.out


MAKE: dict[str, Callable[[int], Any]] = {"sapwood": Sapwood, "pyeclib": Pyeclib, "memcpy": Memcpy}


def missing(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is None
    except ModuleNotFoundError:  # a package above it
        return True


def rates(call: Callable[[], Any], nbytes: int, times: int) -> tuple[float, float]:
    """GB/s by the clock, and per second of CPU."""
    begun, cpu = time.perf_counter(), time.process_time()
    for _ in range(times):
        call()
    done = nbytes * times / 1e9
    return done / (time.perf_counter() - begun), done / max(time.process_time() - cpu, 1e-9)


class ParitySession:
    """One size of block."""

    def __init__(self, case: Case, names: Sequence[str], options: Mapping[str, Any]) -> None:
        for module in ("pyeclib", "sapwood.tiers.codec"):
            if missing(module):
                raise NotRun(f"{module} is not there")
        self.extra = Extra()
        self.nbytes = int(case["block"] * MIB)
        self.times = max(1, int(options["mib"] * MIB) // self.nbytes)
        self.block = np.random.default_rng(0).integers(0, 256, self.nbytes, np.uint8)
        self.made = {name: MAKE[name](self.nbytes) for name in names}
        for name in names:
            self.check(name)

    def check(self, name: str) -> None:
        self.made[name].encode(self.block)
        if not np.array_equal(self.made[name].decode(), self.block):
            self.extra.failed_checks.append(f"{name}: the rebuilt block differs")

    def measure(self, contender: str) -> dict[str, float]:
        one = self.made[contender]
        encode, encode_cpu = rates(lambda: one.encode(self.block), self.nbytes, self.times)
        decode, decode_cpu = rates(one.decode, self.nbytes, self.times)
        return {
            "encode": encode,
            "encode_core": encode_cpu,
            "decode": decode,
            "decode_core": decode_cpu,
        }

    def finish(self) -> Extra:
        return self.extra

    def close(self) -> None:
        self.made = {}


CONTENDERS = (
    Contender(name="sapwood", role="ours", note="the parity tier's codec, 4+2, in stripes"),
    Contender(name="pyeclib", role="peer", note="isa_l_rs_cauchy, 4+2, a call per block"),
    Contender(name="memcpy", role="limit", note="the block copied once, into mapped memory"),
)
METRICS = (
    Metric(
        name="encode",
        unit="GB/s",
        better="higher",
        digits=2,
        meaning="data turned into fragments, wall time",
        ratios=True,
    ),
    Metric(
        name="encode_core", unit="GB/s per core", better="higher", digits=2, meaning="by CPU time"
    ),
    Metric(
        name="decode",
        unit="GB/s",
        better="higher",
        digits=2,
        meaning="data rebuilt with two of its fragments lost, wall time",
    ),
    Metric(
        name="decode_core", unit="GB/s per core", better="higher", digits=2, meaning="by CPU time"
    ),
)
TARGETS = (
    Target(
        text="4+2 encoding at 1 GB/s per core or more",
        metric="encode_core",
        of="ours",
        at="least",
        bound=1,
    ),
)
QUICK = Plan(
    axes={"block": [1, 4, 16]},
    seconds_per_case=3,
    min_rounds=3,
    max_rounds=20,
    options={"mib": 64},
)
FULL = Plan(
    axes={"block": [0.25, 1, 4, 16, 64]},
    seconds_per_case=30,
    min_rounds=10,
    max_rounds=60,
    options={"mib": 128},
)
BENCHMARK = Benchmark(
    name="checkpoint_parity",
    question=__doc__.splitlines()[0],
    contenders=CONTENDERS,
    metrics=METRICS,
    targets=TARGETS,
    open=ParitySession,
    quick=QUICK,
    full=FULL,
)

if __name__ == "__main__":
    sys.exit(main(BENCHMARK))
