"""One rank of a RankGroup: ``python -m core.rank ANSWER_FD SPEC``.

The module named in the spec defines ``prepare(context) -> workload`` and
``CONTENDERS: dict[name, make(workload, context) -> step]``. A step is called without arguments; it
may also have ``close()``. Other functions of the module can be called with the command ``call``;
they get ``(workload, context, made, **arguments)`` and return what JSON can hold.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import resource
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from sapwood.testing._proc import die_with_parent

COLLECTIVE_TIMEOUT = timedelta(seconds=120)
MIB = 2**20


@dataclass(frozen=True, kw_only=True)
class Context:
    rank: int
    world: int
    case: dict[str, Any]
    options: dict[str, Any]
    scratch: Path
    barrier: Callable[[], None]


def usage() -> tuple[float, float, int]:
    switches = resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw
    return time.perf_counter(), time.process_time(), switches


def status_kib(key: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1])
    raise LookupError(f"/proc/self/status has no {key}")


def reset_peak() -> None:
    # 5 sets the high-water mark back to what is resident now (proc_pid_clear_refs).
    Path("/proc/self/clear_refs").write_text("5")


class Commands:
    def __init__(self, module: Any, context: Context) -> None:
        self.module, self.context = module, context
        self.workload = module.prepare(context)
        self.made: dict[str, Any] = {}

    def make(self, contender: str) -> None:
        self.made[contender] = self.module.CONTENDERS[contender](self.workload, self.context)

    def burst(self, contender: str, warm: int, steps: int) -> dict[str, float]:
        """Times ``steps`` as one stretch: a step that leaves work to the next one gains nothing."""
        step = self.made[contender]
        for _ in range(warm):
            step()
        self.context.barrier()
        before = usage()
        for _ in range(steps):
            step()
        after = usage()
        wall, cpu, switches = (end - begin for begin, end in zip(before, after, strict=True))
        return {"wall": wall, "cpu": cpu, "switches": switches}

    def peak_memory(self, contender: str, steps: int) -> float:
        gc.collect()
        reset_peak()
        before = status_kib("VmRSS")
        self.make(contender)
        for _ in range(steps):
            self.made[contender]()
        self.context.barrier()
        return (status_kib("VmHWM") - before) * 1024 / MIB

    def call(self, function: str, **arguments: Any) -> Any:
        chosen = getattr(self.module, function)
        return chosen(self.workload, self.context, self.made, **arguments)

    def close(self) -> None:
        for step in self.made.values():
            getattr(step, "close", lambda: None)()


def serve(commands: Commands, answer: Callable[[Any], None]) -> None:
    answer("ready")
    for line in sys.stdin:
        arguments = json.loads(line)
        answer_value = getattr(commands, arguments.pop("do"))(**arguments)
        answer({} if answer_value is None else answer_value)


def main() -> None:
    # Machines go with the benchmark, and a rank that waits for one would only give up later.
    die_with_parent()
    descriptor, spec = int(sys.argv[1]), json.loads(sys.argv[2])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=COLLECTIVE_TIMEOUT)
    # Our barriers must not queue behind a contender's collectives.
    control = dist.new_group(backend="gloo", timeout=COLLECTIVE_TIMEOUT)
    context = Context(
        rank=dist.get_rank(),
        world=dist.get_world_size(),
        case=spec["case"],
        options=spec["options"],
        scratch=Path(spec["scratch"]),
        barrier=lambda: dist.barrier(group=control),
    )
    with os.fdopen(descriptor, "w") as replies:
        commands = Commands(importlib.import_module(spec["module"]), context)
        serve(commands, lambda value: print(json.dumps(value), file=replies, flush=True))
        commands.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
