"""What runs inside the ranks of data_read.py and data_policies.py.

Every turn is a forked child of the rank: it has no memory, mapping, thread or worker of an earlier
turn, its peak memory is its own, and what it leaves behind can be ended with its process group.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import math
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from core.processes import group_cpu_seconds
from core.rank import Context

from . import data_cold
from .data_formats import TINY, TINY_COUNT, digest_of
from .data_memory import Peak
from .data_reading import Reading, Task

CONTENDERS: dict[str, Any] = {}
GRACE = 20.0
LOOK = 0.02
COLD, WARM = 0.01, 0.99
Make = Callable[[Task], Reading]
Way = Callable[[Reading], dict[str, Any]]
Readings = Mapping[str, Make]


def prepare(context: Context) -> Readings:
    """Imports now what turns need, so that no turn does."""
    found: dict[str, Make] = {}
    for group in context.options["modules"]:
        found |= importlib.import_module(f"contenders.{group}").READINGS
    for package in context.options["packages"]:
        with contextlib.suppress(ImportError):  # the turn will say so
            importlib.import_module(package)
    return found


def turn(
    readings: Readings,
    context: Context,
    made: Any,
    *,
    contender: str,
    cache: str,
    epoch: int,
    seconds: float,
    check: bool,
) -> dict[str, Any]:
    """What ``seconds`` are enough for, but only one epoch if the file is cold: the next is not.

    With ``check`` one epoch, all of it looked at.
    """
    options, case = context.options, context.case
    task = Task(
        folder=Path(options["folder"]),
        count=options["count"],
        nbytes=options["nbytes"],
        batch=options["batch"],
        order=case["order"],
        rank=context.rank,
        world=context.world,
        epoch=epoch,
        address=(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])),
    )
    make = readings[contender]
    way = partial(
        read, seconds=seconds, check=check, epochs=1 if check or cache == "cold" else math.inf
    )
    child = Child(make, task, way, watch=check, timeout=options["timeout"])
    child.await_start()
    leads = context.rank == 0
    wrong = set_cache(task.folder / make(task).format, cache) if leads else None
    context.barrier()
    cpu = group_cpu_seconds() if leads else 0.0
    context.barrier()
    answer = child.run()
    left = child.end()
    context.barrier()
    if wrong:
        return {"error": wrong}
    return {**answer, "left": left, "cpu": group_cpu_seconds() - cpu if leads else 0.0}


def set_cache(folder: Path, cache: str) -> str | None:
    if cache == "cold":
        stayed = data_cold.drop(folder)
        return f"{stayed:.0%} stayed in the page cache" if stayed > COLD else None
    there = data_cold.fill(folder)
    return f"only {there:.0%} fit into the page cache" if there < WARM else None


def read(reading: Reading, seconds: float, *, check: bool, epochs: float) -> dict[str, Any]:
    samples, digest, first, batch = 0, 0, 0.0, None
    begun = ended = time.perf_counter()
    while epochs > 0:
        batches = reading.batches()
        for batch in batches:
            samples += reading.count(batch)
            if check:
                digest += digest_of(reading.records(batch))
            ended = time.perf_counter()
            first = first or ended - begun
            if ended - begun >= seconds and not check:
                epochs = 0
                break
        epochs -= 1
        reading.go_on()
    answer = {"samples": samples, "seconds": ended - begun, "first": first, "digest": digest}
    answer |= {"facts": dict(reading.facts())}
    del batch
    batches.close()  # type: ignore[attr-defined]
    reading.close()
    return answer


class Child:
    """A turn's process, and the rank's ends of its pipes."""

    def __init__(self, make: Make, task: Task, way: Way, *, watch: bool, timeout: float) -> None:
        gc.collect()
        gc.freeze()  # or the child's collector would copy what it inherits
        go_read, self.go = os.pipe()
        self.answer, answer_write = os.pipe()
        self.watch, self.timeout = watch, timeout
        self.pid = os.fork()
        if self.pid == 0:
            os.close(self.go)
            os.close(self.answer)
            os.setpgid(0, 0)
            work(make, task, way, go_read, answer_write)
        with contextlib.suppress(OSError):  # both sides set it, so that neither has to wait
            os.setpgid(self.pid, self.pid)
        os.close(go_read)
        os.close(answer_write)

    def await_start(self) -> None:
        self.early = self.hear(lambda: None)

    def run(self) -> dict[str, Any]:
        if self.early:  # it failed before it began
            return self.early
        peak = Peak(self.pid) if self.watch else None
        with contextlib.suppress(BrokenPipeError):  # it has ended, and hearing it will tell
            os.write(self.go, b"g")
        answer = self.hear(lambda: None if peak is None else peak.look())
        return answer if peak is None else {**answer, "memory": peak.grown}

    def hear(self, meanwhile: Callable[[], None]) -> dict[str, Any]:
        said, deadline = b"", time.monotonic() + self.timeout
        while not said.endswith(b"\n"):
            if select.select([self.answer], [], [], LOOK)[0]:
                piece = os.read(self.answer, 1 << 16)
                if not piece:
                    return {"error": "the process of the turn ended"}
                said += piece
            elif time.monotonic() > deadline:
                return {"error": f"no answer in {self.timeout:.0f} s"}
            meanwhile()
        answer: dict[str, Any] = json.loads(said)
        return answer

    def end(self) -> bool:
        """Whether something had to be ended."""
        os.close(self.go)
        deadline, ended = time.monotonic() + GRACE, False
        while not ended and time.monotonic() < deadline:
            ended = os.waitpid(self.pid, os.WNOHANG)[0] == self.pid
            if not ended:
                time.sleep(0.002)
        os.close(self.answer)
        left = True
        try:
            os.killpg(self.pid, signal.SIGKILL)
        except ProcessLookupError:
            left = False
        if not ended:
            os.waitpid(self.pid, 0)
        return left


def work(make: Make, task: Task, way: Way, go: int, answer: int) -> None:
    """The child; it does not return."""

    def say(what: dict[str, Any]) -> None:
        os.write(answer, json.dumps(what).encode() + b"\n")

    try:
        warm_up(make, task)
        say({})
        os.read(go, 1)
        found = way(make(task))
    except BaseException as error:  # whatever a peer raises
        found = {"error": f"{type(error).__name__}: {error}".splitlines()[0]}
    say(found)
    sys.stderr.flush()
    os._exit(0)


def warm_up(make: Make, task: Task) -> None:
    """Reads a few other records: what a library imports and sets up once is not in the time."""
    tiny = replace(task, folder=task.folder / TINY, count=TINY_COUNT)
    read(make(tiny), 60, check=False, epochs=1)
    gc.collect()
