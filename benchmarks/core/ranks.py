"""A group of long-lived rank processes that execute every contender in turn.

The same processes run all contenders, so placement, page cache and clocks are equal for all.
Commands and answers are one JSON line each, over pipes that nobody else writes to.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import selectors
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from sapwood.cli.launch import KEEP_FREED_MEMORY

from .pmi import Manager
from .processes import GROUP_MARK

BENCHMARKS = Path(__file__).resolve().parent.parent
STDERR_TAIL = 3000
Wrap = Callable[[list[str]], list[str]]


@dataclass(frozen=True, kw_only=True)
class Spot:
    """Where a rank runs: how its command gets there, and how others reach it."""

    wrap: Wrap = lambda command: command
    address: str = "127.0.0.1"
    interface: str = "lo"


class RankFailed(Exception):
    """A rank failed or did not answer in time."""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Rank:
    """The parent's end of one rank process."""

    def __init__(
        self,
        rank: int,
        environment: Mapping[str, str],
        wrap: Wrap,
        spec: str,
        inherited: Sequence[int] = (),
    ) -> None:
        """``environment`` is this rank's own; it keeps the descriptors ``inherited``."""
        self.rank = rank
        self.errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - closed in close
        self.replies, write_end = os.pipe()
        command = [sys.executable, "-m", "core.rank", str(write_end), spec]
        self.process = subprocess.Popen(
            wrap(command),
            stdin=subprocess.PIPE,
            stdout=self.errors,
            stderr=self.errors,
            env=dict(environment),
            cwd=BENCHMARKS,
            pass_fds=[write_end, *inherited],
            start_new_session=True,
        )
        os.close(write_end)
        self.buffer = b""

    def send(self, command: Mapping[str, Any]) -> None:
        assert self.process.stdin is not None
        # A rank that died is reported by its closed answer pipe, with its last words.
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(json.dumps(command).encode() + b"\n")
            self.process.stdin.flush()

    def receive(self) -> Any:
        """The answer if it is complete, else None."""
        piece = os.read(self.replies, 1 << 16)
        if not piece:
            raise RankFailed(self.last_words())
        self.buffer += piece
        if not self.buffer.endswith(b"\n"):
            return None
        answer, self.buffer = json.loads(self.buffer), b""
        return answer

    def last_words(self) -> str:
        # The answer pipe closes before the interpreter has written its traceback.
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(5)
        self.errors.seek(0)
        said = self.errors.read().decode(errors="replace")[-STDERR_TAIL:].strip()
        return f"rank {self.rank} ended with code {self.process.returncode}: {said}"

    def close(self, grace: float) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        try:
            self.process.wait(grace)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        os.close(self.replies)
        self.errors.close()


class RankGroup:
    """``world`` ranks that load ``module`` (see core/rank.py for what it must define)."""

    def __init__(
        self,
        module: str,
        *,
        world: int,
        case: Mapping[str, Any],
        options: Mapping[str, Any],
        wrap: Wrap = lambda command: command,
        spots: Sequence[Spot] = (),
        timeout: float = 300,
        mark: str = "",
        mpi: bool = False,
    ) -> None:
        """Groups with the same ``mark`` count as one when their CPU time is read.

        ``spots`` says where each rank runs; without, all are here, started through ``wrap``. With
        ``mpi``, ranks can start MPI inside ``pmi.managed()``; all machines must then have as many.
        """
        self.timeout = timeout
        self.failed = False
        self.scratch = tempfile.TemporaryDirectory(prefix="bench-")
        spec = {"module": module, "case": case, "options": options, "scratch": self.scratch.name}
        spots = spots or [Spot(wrap=wrap)] * world
        common = KEEP_FREED_MEMORY | self.environment(spots, mark or secrets.token_hex(8))
        self.ranks: list[Rank] = []
        self.manager: Manager | None = None
        try:
            if mpi:
                local = self.place_of(0, spots)["LOCAL_WORLD_SIZE"]
                self.manager = Manager(len(spots), int(local))
            for rank, spot in enumerate(spots):
                environment = {**common, **self.place_of(rank, spots)}
                self.ranks.append(self.start(rank, environment, spot, json.dumps(spec)))
            if self.manager is not None:
                self.manager.started()
            self.gather()
        except BaseException:
            self.close()
            raise

    def start(self, rank: int, environment: dict[str, str], spot: Spot, spec: str) -> Rank:
        if self.manager is None:
            return Rank(rank, environment, spot.wrap, spec)
        environment |= self.manager.environment(rank)
        environment["FI_TCP_IFACE"] = spot.interface
        return Rank(rank, environment, spot.wrap, spec, [self.manager.descriptor(rank)])

    @staticmethod
    def environment(spots: Sequence[Spot], mark: str) -> dict[str, str]:
        inherited = os.environ.get("PYTHONPATH")
        return {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, [str(BENCHMARKS), inherited])),
            "WORLD_SIZE": str(len(spots)),
            "MASTER_ADDR": spots[0].address,
            "MASTER_PORT": str(free_port()),
            "OMP_NUM_THREADS": "1",
            # Marks whatever the ranks start, also what detaches from them (see processes.py).
            GROUP_MARK: mark,
        }

    @staticmethod
    def place_of(rank: int, spots: Sequence[Spot]) -> dict[str, str]:
        here = [n for n, spot in enumerate(spots) if spot.address == spots[rank].address]
        return {
            "RANK": str(rank),
            "LOCAL_RANK": str(here.index(rank)),
            "LOCAL_WORLD_SIZE": str(len(here)),
            # Host names do not resolve in private namespaces.
            "GLOO_SOCKET_IFNAME": spots[rank].interface,
            # A group on one machine keeps to it otherwise, and its clones may be on another.
            "SAPWOOD_HOST": spots[rank].address,
        }

    def ask(self, do: str, **arguments: Any) -> list[Any]:
        """Sends one command to all ranks; their answers, in order of rank."""
        for rank in self.ranks:
            rank.send({"do": do, **arguments})
        return self.gather()

    def gather(self) -> list[Any]:
        try:
            return self.answers()
        except RankFailed:
            self.failed = True
            raise

    def answers(self) -> list[Any]:
        answers: dict[int, Any] = {}
        deadline = time.monotonic() + self.timeout
        with selectors.DefaultSelector() as selector:
            for rank in self.ranks:
                selector.register(rank.replies, selectors.EVENT_READ, rank)
            while len(answers) < len(self.ranks):
                ready = selector.select(max(0.0, deadline - time.monotonic()))
                if not ready:
                    silent = [rank.rank for rank in self.ranks if rank.rank not in answers]
                    raise RankFailed(f"ranks {silent} gave no answer in {self.timeout:.0f} s")
                for key, _ in ready:
                    answer = key.data.receive()
                    if answer is not None:
                        answers[key.data.rank] = answer
        return [answers[rank.rank] for rank in self.ranks]

    def make(self, contender: str) -> None:
        self.ask("make", contender=contender)

    def burst(self, contender: str, *, warm: int, steps: int) -> dict[str, float]:
        """Per step: wall seconds of the slowest rank; CPU and switches summed over the ranks."""
        answers = self.ask("burst", contender=contender, warm=warm, steps=steps)
        return {
            "wall": max(answer["wall"] for answer in answers) / steps,
            "cpu": sum(answer["cpu"] for answer in answers) / steps,
            "switches": sum(answer["switches"] for answer in answers) / steps,
        }

    def peak_memory(self, contender: str, *, steps: int) -> float:
        """MiB a contender adds at its peak, in the rank that needs most.

        Honest only in a group where nothing was made before: allocators keep what they got.
        """
        return max(self.ask("peak_memory", contender=contender, steps=steps))

    def close(self) -> None:
        for rank in self.ranks:
            assert rank.process.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                rank.process.stdin.close()
        for rank in self.ranks:
            # Ranks left behind by a failed one wait for it in a collective: no use in patience.
            rank.close(grace=0.2 if self.failed else 20)
        self.ranks = []
        if self.manager is not None:
            self.manager.close()
            self.manager = None
        self.scratch.cleanup()
