"""Do more providers make saves and loads of models faster, where each has 200 MB/s?

python benchmarks/store_scaling.py --quick
python benchmarks/store_scaling.py --full --case clients=4
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from core import Benchmark, Case, Contender, Extra, Metric, NotRun, Plan, Target, main

from sapwood.testing.machines import Machines, Unavailable

ROOT = Path(__file__).resolve().parents[1]
CLIENT = Path(__file__).resolve().parent / "contenders" / "store_client.py"
MB = 10**6
LINK_MB = 200
GBIT = LINK_MB * 8 / 1000
PORT = 7070
TOKEN = "a-token-of-the-benchmark"
SETS: Mapping[str, tuple[int, str]] = {
    "1 provider": (1, "content"),
    "2 providers": (2, "content"),
    "4 providers": (4, "content"),
    "4 by model": (4, "model"),
}
MOST = max(count for count, _ in SETS.values())
SECONDS = 120.0


class Line:
    """A process that answers lines of JSON, or one that only says that it serves."""

    def __init__(self, command: Sequence[str]) -> None:
        environment = {
            **os.environ,
            "PYTHONPATH": str(ROOT / "src"),
            "SAPWOOD_STORE_TOKEN": TOKEN,
            "OMP_NUM_THREADS": "1",
        }
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, text=True
        )

    def send(self, **told: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(told) + "\n")
        self.process.stdin.flush()

    def receive(self) -> str:
        assert self.process.stdout is not None
        if not select.select([self.process.stdout], [], [], SECONDS)[0]:
            raise RuntimeError(f"no answer in {SECONDS:g} s: {self.process.args}")
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"it ended: {self.process.args}")
        return line

    def close(self) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        self.process.terminate()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process.stdout.close()


class ScalingSession:
    """Clients on machine 0, whose link has no limit; on each other one a provider of each set."""

    def __init__(self, case: Case, names: Sequence[str], options: Mapping[str, Any]) -> None:
        self.nbytes = int(options["mb"]) * MB * int(case["clients"])
        self.turn = 0
        self.extra = Extra()
        self.ending = contextlib.ExitStack()
        try:
            machines = Machines(MOST + 1, GBIT, unlimited=[0])
            self.machines = self.ending.enter_context(machines)
        except Unavailable as reason:
            raise NotRun(str(reason)) from reason
        try:
            self.extra.facts["link"] = f"{machines.measure(1, 0) * 1000 / 8:.0f} MB/s measured"
            self.clients = {
                name: self.start(name, at, case, options) for at, name in enumerate(names)
            }
            for name in names:
                self.measure(name)
                for _ in self.told(name, do="check"):
                    pass
        except BaseException:
            self.close()
            raise

    def start(self, name: str, at: int, case: Case, options: Mapping[str, Any]) -> Sequence[Line]:
        count, placement = SETS[name]
        folder = Path(self.ending.enter_context(tempfile.TemporaryDirectory()))
        token = folder / "token"
        token.write_text(TOKEN)
        token.chmod(0o600)
        addresses = [f"{self.machines.address(n + 1)}:{PORT + at}" for n in range(count)]
        members = ",".join(f"p{n}={address}" for n, address in enumerate(addresses))
        sapwood = [sys.executable, "-m", "sapwood", "store", "serve", "memory:"]
        sapwood += ["--memory", f"{4 * self.nbytes}", "--token-file", str(token)]
        sapwood += ["--members", members, "--placement", placement]
        servers = [
            Line(self.machines.command(n + 1, [*sapwood, "--name", f"p{n}", "--listen", address]))
            for n, address in enumerate(addresses)
        ]
        for server in servers:
            self.ending.callback(server.close)
        for server in servers:
            server.receive()
        url = "sapwood://" + ",".join(addresses)
        size = [str(options["mb"]), str(options["tensors"])]
        clients = []
        for seed in range(case["clients"]):
            command = [sys.executable, str(CLIENT), url, *size, str(seed)]
            clients.append(Line(self.machines.command(0, command)))
            self.ending.callback(clients[-1].close)
        for client in clients:
            client.receive()
        return clients

    def told(self, contender: str, **what: Any) -> Sequence[Mapping[str, Any]]:
        """What all clients of a set answer, who do the same at once."""
        for client in self.clients[contender]:
            client.send(**what)
        answers = [json.loads(client.receive()) for client in self.clients[contender]]
        for answer in answers:
            if "error" in answer:
                self.extra.failed_checks.append(f"{contender}: {what}: {answer['error']}")
        return answers

    def measure(self, contender: str) -> dict[str, float]:
        self.turn += 1
        self.told(contender, do="change")
        found = {}
        for what in ("save", "load"):
            time.sleep(0.1)  # the burst that a link lets through for free is of both
            begun = time.perf_counter()
            self.told(contender, do=what, version=self.turn)
            found[what] = self.nbytes / MB / (time.perf_counter() - begun)
        self.told(contender, do="check")
        self.told(contender, do="remove", version=self.turn)
        self.clients[contender][0].send(do="tidy")
        self.clients[contender][0].receive()
        return found

    def finish(self) -> Extra:
        return self.extra

    def close(self) -> None:
        self.ending.close()


def scale(measured: dict[str, dict[str, float]]) -> None:
    """How many times as fast as one provider, in the same round."""
    one = measured.get("1 provider")
    for metrics in measured.values():
        for what in ("save", "load"):
            if one is not None and what in metrics:
                metrics[f"{what}_scale"] = metrics[what] / one[what]


CONTENDERS = (
    Contender(name="4 providers", role="ours", note="tensors placed by their contents"),
    Contender(name="2 providers", role="variant", note="the same"),
    Contender(name="1 provider", role="baseline", note="everything through one link"),
    Contender(
        name="4 by model", role="variant", note="whole models by name modulo providers, as DStore"
    ),
)
METRICS = (
    Metric(
        name="save", unit="MB/s", better="higher", digits=0, meaning="all clients together",
    ),
    Metric(
        name="load", unit="MB/s", better="higher", digits=0, meaning="into tensors that are there",
    ),
    Metric(
        name="save_scale", unit="x", better="higher", digits=2, meaning="of one provider's save",
    ),
    Metric(
        name="load_scale", unit="x", better="higher", digits=2, meaning="of one provider's load",
    ),
)  # fmt: skip
TARGETS = tuple(
    Target(
        text=f"4 providers {what} at least 3.5 times as fast as one",
        metric=f"{what}_scale",
        of="ours",
        at="least",
        bound=3.5,
    )
    for what in ("save", "load")
)
QUICK = Plan(
    axes={"clients": [1, 4]},
    seconds_per_case=0,
    min_rounds=2,
    max_rounds=2,
    options={"mb": 100, "tensors": 100},
)
FULL = Plan(
    axes={"clients": [1, 2, 4]},
    seconds_per_case=60,
    min_rounds=5,
    max_rounds=10,
    options={"mb": 400, "tensors": 200},
)
BENCHMARK = Benchmark(
    name="store_scaling",
    question=__doc__.splitlines()[0],
    contenders=CONTENDERS,
    metrics=METRICS,
    targets=TARGETS,
    open=ScalingSession,
    quick=QUICK,
    full=FULL,
    derive=scale,
)

if __name__ == "__main__":
    sys.exit(main(BENCHMARK))
