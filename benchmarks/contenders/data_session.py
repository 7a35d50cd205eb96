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

from core import Case, Extra, NotRun, RankGroup, Spot
from core.ranks import BENCHMARKS

from .data_costs import Answers, read_metrics, wrong_records
from .data_needs import OURS, STEADY, UNCHECKED, format_of, modules_of, packages_of
from .equality import error_in

MODULE = "contenders.data_turn"
MIB = 2**20


class Data:
    """Records in some formats, in a folder that goes when the benchmark ends."""

    made: dict[tuple[int, int], Data] = {}  # noqa: RUF012 - shared on purpose: made once

    def __init__(self, count: int, nbytes: int) -> None:
        self.count, self.nbytes = count, nbytes
        self.folder = tempfile.TemporaryDirectory(prefix="bench-data-")
        atexit.register(self.folder.cleanup)
        self.written: set[str] = set()
        self.failed: dict[str, str] = {}
        self.digest = 0

    @classmethod
    def of(cls, count: int, nbytes: int) -> Data:
        if (count, nbytes) not in cls.made:
            cls.made[count, nbytes] = cls(count, nbytes)
        return cls.made[count, nbytes]

    def need(self, formats: set[str]) -> None:
        """Writes those that are not there yet."""
        missing = sorted(formats - self.written)
        if not missing:
            return
        command = [sys.executable, "-m", "contenders.data_formats", self.folder.name]
        done = subprocess.run(
            [*command, str(self.count), str(self.nbytes), *missing],
            cwd=BENCHMARKS,
            env=RankGroup.environment([Spot()], "data"),
            capture_output=True,
            text=True,
            timeout=600,
        )
        if done.returncode:
            raise NotRun(f"the data could not be made: {done.stderr.splitlines()[-1:]}")
        found = json.loads(done.stdout)
        self.written |= set(missing)
        self.failed |= found["failed"]
        self.digest = found["digest"]


class DataSession:
    """One kind of record, cold or warm, in one order, on some ranks."""

    epochs = itertools.count(1)
    checked: dict[tuple[Any, ...], float] = {}  # noqa: RUF012 - of the whole run
    """Peak memory of peers whose records were looked at: the page cache changes neither."""

    def __init__(self, case: Case, names: Sequence[str], options: Mapping[str, Any]) -> None:
        self.case, self.options = case, options
        self.size = options["sizes"][case["records"]]
        self.data = Data.of(self.size["count"], self.size["nbytes"])
        self.data.need({format_of(name) for name in names} | {"lmdb"})
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
        return self.data.failed.get(format_of(name))

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
            seconds=self.options[
                "steady_seconds" if name in STEADY or cache == "warm" else "seconds"
            ],
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
        cache = self.case["cache"] if name in OURS else "warm"
        key = (self.data.folder.name, name, self.case["order"], self.case["ranks"], cache)
        if key not in self.checked:
            answers = self.turn(name, cache=cache, check=True)
            if answers is None:
                return
            self.compare(name, answers)
            self.checked[key] = max(answer["memory"] for answer in answers) / MIB
        self.extra.samples.setdefault(name, {})["memory"] = [self.checked[key]]

    def compare(self, name: str, answers: Answers) -> None:
        times = self.options.get("times", {}).get(self.case["order"], 1)
        self.extra.failed_checks += wrong_records(
            name, answers, count=self.size["count"] * times, digest=self.data.digest * times
        )

    def measure(self, contender: str) -> dict[str, float]:
        if contender not in self.names:
            return {}
        answers = self.turn(contender, cache=self.case["cache"])
        return {} if answers is None else self.metrics(answers)

    def metrics(self, answers: Answers) -> dict[str, float]:
        return read_metrics(answers, nbytes=self.size["nbytes"], count=self.size["count"])

    def finish(self) -> Extra:
        return self.extra

    def close(self) -> None:
        with contextlib.suppress(AttributeError):  # it may not have come that far
            self.group.close()


def read_ahead(folder: Path) -> str:
    """How far the kernel reads ahead on that disk: it decides how mappings do."""
    device = folder.stat().st_dev
    major, minor = device >> 8 & 0xFFF, device & 0xFF | device >> 12 & 0xFFF00
    found = Path(f"/sys/dev/block/{major}:{minor}/queue/read_ahead_kb")
    if not found.exists():
        found = found.parent.parent.parent / "queue" / "read_ahead_kb"
    return f"{found.read_text().strip()} KiB" if found.exists() else "unknown"
