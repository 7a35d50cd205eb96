"""The parent's end of the data benchmarks: data, ranks, turns and what they measured."""

from __future__ import annotations

import atexit
import contextlib
import itertools
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from core import Case, Extra, NotRun, RankGroup
from core.ranks import BENCHMARKS

from .data_needs import FORMAT_OF, OURS, UNCHECKED, modules_of, packages_of
from .equality import error_in

MODULE = "contenders.data_turn"
MIB = 2**20
Answers = Sequence[Mapping[str, Any]]


class Data:
    """Records in every format, in a folder that goes when the benchmark ends."""

    made: dict[tuple[int, int], Data] = {}  # noqa: RUF012 - shared on purpose: made once

    def __init__(self, count: int, nbytes: int) -> None:
        self.folder = tempfile.TemporaryDirectory(prefix="bench-data-")
        atexit.register(self.folder.cleanup)
        command = [sys.executable, "-m", "contenders.data_formats", self.folder.name]
        done = subprocess.run(
            [*command, str(count), str(nbytes)],
            cwd=BENCHMARKS,
            env=RankGroup.environment(1, "data"),
            capture_output=True,
            text=True,
            timeout=600,
        )
        if done.returncode:
            raise NotRun(f"the data could not be made: {done.stderr.splitlines()[-1:]}")
        found = json.loads(done.stdout)
        self.failed: dict[str, str] = found["failed"]
        self.digest: int = found["digest"]

    @classmethod
    def of(cls, count: int, nbytes: int) -> Data:
        if (count, nbytes) not in cls.made:
            cls.made[count, nbytes] = cls(count, nbytes)
        return cls.made[count, nbytes]


class DataSession:
    """One kind of record, cold or warm, in one order, on some ranks."""

    epochs = itertools.count(1)

    def __init__(self, case: Case, names: Sequence[str], options: Mapping[str, Any]) -> None:
        self.case, self.options = case, options
        self.size = options["sizes"][case["records"]]
        self.data = Data.of(self.size["count"], self.size["nbytes"])
        self.extra = Extra()
        self.names = [name for name in names if not self.excluded(name, self.unwritten(name))]
        settings = {
            **self.size,
            "folder": self.data.folder.name,
            "modules": modules_of(self.names),
            "packages": packages_of(self.names),
            "timeout": options["timeout"],
        }
        self.group = RankGroup(
            MODULE, world=case["ranks"], case=case, options=settings, timeout=300
        )
        try:
            for name in list(self.names):
                self.check(name)
        except BaseException:
            self.close()
            raise

    def unwritten(self, name: str) -> str | None:
        return self.data.failed.get(FORMAT_OF.get(name, "lmdb"))

    def excluded(self, name: str, reason: str | None) -> bool:
        if reason is None:
            return False
        if name in OURS:
            self.extra.failed_checks.append(f"{name}: {reason}")
        else:
            self.extra.facts[f"not run: {name}:"] = reason
        return True

    def turn(self, name: str, *, cache: str, check: bool = False) -> Answers | None:
        answers = self.group.ask(
            "call",
            function="turn",
            contender=name,
            cache=cache,
            epoch=next(self.epochs),
            seconds=self.options["seconds"],
            check=check,
        )
        if self.excluded(name, error_in(answers)):
            self.names.remove(name)
            return None
        if any(answer["left"] for answer in answers):
            self.extra.facts[f"processes left behind: {name}:"] = "ended by the benchmark"
        return answers

    def check(self, name: str) -> None:
        """A whole epoch, untimed and warm: are all records there, once? And the peak memory."""
        if name in UNCHECKED:
            return
        answers = self.turn(name, cache=self.case["cache"] if name in OURS else "warm", check=True)
        if answers is None:
            return
        samples = sum(answer["samples"] for answer in answers)
        digest = sum(answer["digest"] for answer in answers)
        times = self.options.get("times", {}).get(self.case["order"], 1)
        wanted = (self.size["count"] * times, self.data.digest * times)
        if (samples, digest) != wanted:
            self.extra.failed_checks.append(
                f"{name}: {samples} records of {wanted[0]}, sum of checksums "
                f"{'differs' if digest != wanted[1] else 'is equal'}"
            )
        peak = max(answer["memory"] for answer in answers) / MIB
        self.extra.samples.setdefault(name, {})["memory"] = [peak]

    def measure(self, contender: str) -> dict[str, float]:
        if contender not in self.names:
            return {}
        answers = self.turn(contender, cache=self.case["cache"])
        return {} if answers is None else metrics(answers, self.size["nbytes"], self.size["count"])

    def finish(self) -> Extra:
        return self.extra

    def close(self) -> None:
        with contextlib.suppress(AttributeError):  # it may not have come that far
            self.group.close()


def metrics(answers: Answers, nbytes: int, count: int) -> dict[str, float]:
    """Of the whole group; it is as slow as its slowest rank."""
    samples = sum(answer["samples"] for answer in answers)
    seconds = max(answer["seconds"] for answer in answers)
    found = {
        "rate": samples / seconds / 1e3,
        "bytes": samples * nbytes / seconds / 1e6,
        "cpu": answers[0]["cpu"] / (samples * nbytes / 1e9),
        "first": max(answer["first"] for answer in answers) * 1e3,
        "part": 100 * samples / count,
    }
    facts = [answer["facts"] for answer in answers if answer["facts"]]
    if facts:
        found |= {name: sum(fact[name] for fact in facts) for name in facts[0]}
    return found


def read_ahead(folder: Path) -> str:
    """How far the kernel reads ahead on that disk: it decides how mappings do."""
    device = folder.stat().st_dev
    major, minor = device >> 8 & 0xFFF, device & 0xFF | device >> 12 & 0xFFF00
    found = Path(f"/sys/dev/block/{major}:{minor}/queue/read_ahead_kb")
    if not found.exists():
        found = found.parent.parent.parent / "queue" / "read_ahead_kb"
    return f"{found.read_text().strip()} KiB" if found.exists() else "unknown"
